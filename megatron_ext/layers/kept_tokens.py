"""Tokens that stay with the experts that have got them, for layers that are recomputed.

The backward pass of a recomputed layer runs its forward pass again, and exchanges the tokens of its
experts again. With ``--moe-keep-dispatched-tokens`` the first pass keeps the tokens that have
arrived at this rank's experts and, where it is read again, the layer's output. The second pass
takes them, and sends nothing; only gradients are exchanged. Results are the same bit by bit.

Each forward pass of a model chunk has a `Record` of what its layers keep. It belongs to the graph
of the chunk's output: the backward pass begins with a node that hands out the record, and a graph
that is never used takes its record with it. So it does not matter in which order a schedule runs
its micro-batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers.hooks import in_backward

Kept = dict[str, Any]
"""The values that one layer keeps of one forward pass, by names that its dispatcher chooses."""

Record = dict[object, list[Kept]]
"""For each dispatcher of a model chunk, the values that it keeps of one forward pass of the chunk.

A layer that runs several times in a pass has as many entries.
"""


class KeptTokens:
    """The records of the passes that are under way in this rank's model chunks."""

    def __init__(self) -> None:
        self._forward: Record | None = None
        self._backward: Record = {}

    def __deepcopy__(self, _memo: Any) -> KeptTokens:
        """Return this object: modules that copy their configuration must share its records."""
        return self

    def follow(self, chunk: torch.nn.Module) -> None:
        """Give each forward pass of a model chunk in training a record of its own."""
        chunk.register_forward_pre_hook(self._begin)
        chunk.register_forward_hook(self._end)

    def _begin(self, chunk: torch.nn.Module, _inputs: Any) -> None:
        self._forward = {} if chunk.training and torch.is_grad_enabled() else None

    def _end(self, _chunk: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        record = self._forward
        self._forward = None
        if not record or not isinstance(output, Tensor):
            # Nothing is kept of outputs of other kinds: their layers exchange tokens again.
            return output
        return _HandOut.apply(self, record, output)  # type: ignore[no-untyped-call]

    def hand_out(self, record: Record) -> None:
        """Let the layers that the current backward pass recomputes take their tokens from here."""
        self._backward = record

    def of_pass(self, dispatcher: object) -> tuple[Kept | None, bool]:
        """Return what a layer keeps of its current pass, and whether this is the second pass.

        ``dispatcher`` is the layer's. Return None if it keeps nothing, since it is not recomputed.
        In the first pass the result is empty, and the layer fills it.
        """
        if not torch.is_grad_enabled():
            # Core computes recomputed layers without gradients at first.
            if self._forward is None:
                return None, False
            kept: Kept = {}
            self._forward.setdefault(dispatcher, []).append(kept)
            return kept, False
        # A layer may be recomputed in some micro-batches only: forward passes take nothing.
        waiting = self._backward.get(dispatcher) if in_backward() else None
        return (waiting.pop(), True) if waiting else (None, False)


class _HandOut(torch.autograd.Function):
    """Returns its input; its backward pass hands out the record of a model chunk."""

    @staticmethod
    def forward(ctx: Any, kept: KeptTokens, record: Record, output: Tensor) -> Tensor:
        ctx.kept = kept
        ctx.record = record
        # megatron-core frees outputs that have been sent, which must be no views.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.kept.hand_out(ctx.record)
        return None, None, gradient
