"""Computes a training step again from the same state, and compares the results bit by bit.

The forward and backward passes of a step change random generators, buffers of modules (statistics
of routers, histories of 8-bit scales) and the logs of auxiliary losses, but no weights. `StepStart`
restores these. The caller keeps the batches of the step, and the gradient buffers are zeroed before
each computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_ext import core
from megatron_ext.checkpoint.state import random_state, restore_random_state
from megatron_ext.layers.fp8.linear import AmaxHistories
from megatron_ext.losses.contract import Report
from megatron_ext.optim.update import parts_of
from megatron_ext.parallel.context import ParallelContext


def digest(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's 64-bit words modulo 2^64, int64 ``[]``.

    A single flipped bit always changes the sum. It takes one pass over the tensor.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    start = -data.storage_offset() % 8
    end = start + max(0, data.numel() - start) // 8 * 8
    ends = [data[:start], data[end:]]
    words = data[start:end].view(torch.int64).sum()
    return words + torch.stack([part.sum(dtype=torch.int64) for part in ends]).sum()


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digest of each tensor, int64 ``[n]``."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    # Weights that the host updates, and their state, may lie on another device.
    return torch.stack([digest(tensor).to(tensors[0].device) for tensor in tensors])


class StepStart:
    """A copy, made before a step, of the state that the forward and backward passes change.

    Args:
        optimizer: its fp16 loss scalers are copied too, because they change in each step, even if
            the update is not applied.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: Any,
        histories: AmaxHistories | None,
        context: ParallelContext,
    ) -> None:
        self._context = context
        self._histories = histories
        buffers = [buffer for chunk in chunks for buffer in chunk.module.buffers()]
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
        self._random: list[Any] = random_state(context).data
        parts = parts_of(optimizer)
        scalers = [x for part in parts if (x := getattr(part, "grad_scaler", None)) is not None]
        self._scalers = [(scaler, _copied(scaler.state_dict())) for scaler in scalers]
        self._marks = None if histories is None else histories.marks()

    def restore(self) -> None:
        """Restore the state, so that the step can be computed again."""
        for buffer, before in self._buffers:
            buffer.copy_(before)
        restore_random_state(self._context, self._random)
        for scaler, before in self._scalers:
            scaler.load_state_dict(_copied(before))
        if self._histories is not None and self._marks is not None:
            self._histories.set_marks(self._marks)
        core.take_auxiliary_losses()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}


@dataclass(frozen=True)
class Outcome:
    """Digests of the results of a step on this rank, one for each gradient and loss.

    Attributes:
        own: gradients of this rank's own micro-batches ``[n]``; empty if they are reduced during
            the backward pass.
        reduced: gradients after their reduction over the replicas, ``[n]``.
        losses: all losses that the micro-batches report, ``[m]``; empty on all pipeline stages but
            the last.
    """

    own: Tensor
    reduced: Tensor
    losses: Tensor

    def differing(self, other: Outcome, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Compare with another outcome of the same step; return two lists of differences.

        The first list names the parameters whose gradients differ before their reduction, and "the
        loss" if it differs. The second list names the parameters whose gradients differ after the
        reduction. ``names`` are the names of all parameters. A single different bit counts.
        """
        losses = ["the loss"] if not torch.equal(self.losses, other.losses) else []
        own, reduced = (
            [names[i] for i in (mine != theirs).nonzero().flatten().tolist()]
            for mine, theirs in ((self.own, other.own), (self.reduced, other.reduced))
        )
        return own + losses, reduced


def digest_of_reports(reports: Sequence[Report]) -> Tensor:
    """Return the digests of the losses that a step's micro-batches report, int64 ``[m]``."""
    return digests([report[name] for report in reports for name in report])
