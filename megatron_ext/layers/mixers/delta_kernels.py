"""The gated delta rule by the Triton kernels of flash-linear-attention, where they import."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers.mixers.delta_rule import DeltaRule

KERNELS = {
    False: ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    True: ("fla.ops.kda", "chunk_kda"),
}
"""Module and name of a kernel, by whether each channel has its own decay."""


@functools.lru_cache(maxsize=2)
def kernel(by_channel: bool) -> Any:
    """Return the function of flash-linear-attention; None where it does not import."""
    module, name = KERNELS[by_channel]
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


class KernelDeltaRule(DeltaRule):
    """A `DeltaRule` whose outputs are computed by the kernels, in half precision on a GPU.

    The kernels give no transitions, so that `summary` is that of `DeltaRule`.
    """

    def outputs(self, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[b, s, h, v]`` and the final state, see `DeltaRule.outputs`."""
        state = self._state(self.values.size(-1)) if initial_state is None else initial_state
        dtype = self.values.dtype
        inputs = [self.queries.to(dtype), self.keys.to(dtype), self.values, self.decays, self.beta]
        call = kernel(self.decays.dim() == 4)
        if self.segments is None:
            output, final = call(*inputs, initial_state=state, output_final_state=True)
            return output, final
        starts = self._starts(self.segments)
        first = torch.nonzero(starts.flatten()).squeeze(1)
        ends = torch.cat((first, first.new_tensor([starts.numel()])))
        # Only the first document of a sequence can continue the state before it.
        rows = starts.cumsum(1)[:, -1].cumsum(0)
        states = state.new_zeros(len(first), *state.shape[1:])
        continues = (self.segments[:, 0] == 0).to(state.dtype)[:, None, None, None]
        begins = torch.cat((rows.new_zeros(1), rows[:-1]))
        states = states.index_copy(0, begins, state * continues)
        output, final = call(
            *(x.flatten(0, 1)[None] for x in inputs),
            initial_state=states,
            output_final_state=True,
            cu_seqlens=ends,
        )
        return output.view_as(self.values), final[rows - 1]

    @staticmethod
    def _starts(segments: Tensor) -> Tensor:
        """Return ``[b, s]``, True at the first token of each document and sequence."""
        starts = torch.ones_like(segments, dtype=torch.bool)
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        return starts


def delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    beta: Tensor,
    segments: Tensor | None = None,
) -> DeltaRule:
    """Return the rule for these inputs, see `DeltaRule`, by kernels where there are some."""
    half = values.is_cuda and values.dtype in (torch.bfloat16, torch.float16)
    by_kernels = half and kernel(decays.dim() == 4) is not None
    kind = KernelDeltaRule if by_kernels else DeltaRule
    return kind(queries, keys, values, decays, beta, segments=segments)
