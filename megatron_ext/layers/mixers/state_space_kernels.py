"""The recurrence of Mamba-2 by the Triton kernels of ``mamba_ssm``, where they import, on a GPU."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers.mixers.state_space import StateSpace

CHUNK = 256
"""Tokens of a chunk of the kernels."""


@functools.lru_cache(maxsize=1)
def kernel() -> Any:
    """Return ``mamba_chunk_scan_combined`` of mamba_ssm; None where it does not import."""
    try:
        module = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    except ImportError:
        return None
    return module.mamba_chunk_scan_combined


class KernelStateSpace:
    """The recurrence of a `StateSpace`, with the same arguments and results, on a GPU.

    The kernels compute everything in one call, so the call that needs the state before the
    sequences comes after another one that gives their own summary.
    """

    def __init__(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> None:
        self.dt = dt.float()
        self.a = a.float()
        self.segments = segments
        self.inputs = (x, self.dt, self.a, b.to(x.dtype), c.to(x.dtype))
        self.d = None if d is None else d.float()

    def summary(self) -> tuple[Tensor, Tensor]:
        """Return the factor of the state before the sequences, and the state after them without it.

        See `StateSpace.summary`.
        """
        factor = (self.dt.sum(dim=1) * self.a).exp()
        if self.segments is not None:
            factor = factor * (self.segments[:, -1] == 0)[:, None]
        return factor, self.outputs()[1]

    def outputs(self, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[batch, s, n, p]``, and the state after them ``[batch, n, k, p]``.

        See `StateSpace.outputs`.
        """
        before = None if initial_state is None else initial_state.transpose(2, 3).contiguous()
        # The kernels take segment 0 for that of the initial states.
        segments = None if self.segments is None else self.segments.int().contiguous()
        y, state = kernel()(
            *self.inputs, CHUNK, D=self.d, initial_states=before, seq_idx=segments,
            return_final_states=True,
        )  # fmt: skip
        return y, state.transpose(2, 3)


def state_space(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    segments: Tensor | None = None,
) -> StateSpace | KernelStateSpace:
    """Return the recurrence of these inputs, see `StateSpace`, by kernels where there are some."""
    by_kernels = x.is_cuda and x.dtype != torch.float64 and kernel() is not None
    kind = KernelStateSpace if by_kernels else StateSpace
    return kind(x, dt, a, b, c, d, segments)
