"""The exchange of tokens between ranks of experts, hidden behind another micro-batch's computing.

With ``--overlap-moe-expert-parallel-comm`` a forward pass of one micro-batch and a backward pass of
another run in turns (`parallel.turns`). Each gives way to the other after it has started an
all-to-all, and waits for the result only when it is its turn again. With the backward pass first,
a layer of each is run in this order::

    backward:  start combine'              experts', start dispatch'            attention'
    forward:                  attention, start dispatch             experts, start combine

With ``--ep-overlap-early-attn-memory-release``, attention' comes before the forward pass's experts.
Here ' marks the backward pass of an operation. So each all-to-all is under way while the other
micro-batch computes. NCCL's all-to-alls run on a stream of their own, Gloo's on threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.fp8.rows import RowFormat
from megatron_ext.layers.moe import AlltoAllDispatcher
from megatron_ext.layers.weight_gradients import DeferredWeightGradients
from megatron_ext.parallel.turns import Turns

Splits = Sequence[int] | None
"""Numbers of rows for each rank of a group, or None for equal numbers."""

Formats = tuple[RowFormat | None, RowFormat | None]
"""The 8-bit formats of rows that are sent, and of their gradients; None for no format."""


def exchange(
    turns: Turns | None,
    group: ProcessGroup,
    tensors: Sequence[Tensor],
    output_splits: Splits,
    input_splits: Splits,
    deferred: DeferredWeightGradients | None = None,
    formats: Formats = (None, None),
) -> tuple[Tensor, ...]:
    """Send parts of each tensor to the ranks of a group, and return the parts received from them.

    While the parts are under way, in the forward and in the backward pass, the other pass of a pair
    goes on (`Turns.give_way`).

    Args:
        turns: runs the pair; None waits for the parts at once.
        output_splits: numbers of rows to receive from each rank.
        input_splits: numbers of rows to send to each rank.
        deferred: queues of weight gradients. Those that the backward pass has queued so far are
            computed while the parts of the gradient are under way.
        formats: the 8-bit formats in which the rows of the first tensor are sent, and those of its
            gradient. The gradient is that of rows that are sent as they are.
    """
    if group.size() == 1:
        return tuple(tensors)
    received: tuple[Tensor, ...] = _Exchange.apply(  # type: ignore[no-untyped-call]
        turns, group, output_splits, input_splits, deferred, formats, *tensors
    )
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        turns: Turns | None,
        group: ProcessGroup,
        output_splits: Splits,
        input_splits: Splits,
        deferred: DeferredWeightGradients | None,
        formats: Formats,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        there, back = formats
        ctx.call = turns, group, input_splits, output_splits, deferred, back
        return exchanged(turns, group, output_splits, input_splits, tensors, rows_as=there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, None, None, None, *exchanged_back(gradients, *ctx.call)


def exchanged_back(
    gradients: Sequence[Tensor],
    turns: Turns | None,
    group: ProcessGroup,
    output_splits: Splits,
    input_splits: Splits,
    deferred: DeferredWeightGradients | None,
    rows_as: RowFormat | None,
) -> tuple[Tensor, ...]:
    """Send the gradients of what an exchange has brought to where the parts came from.

    The other arguments are those of `exchanged`.
    """
    # Probabilities come along only on the way to the experts, the last of a backward pass.
    early = turns is not None and turns.releases_early and len(gradients) > 1
    splits = output_splits, input_splits
    return exchanged(turns, group, *splits, gradients, deferred, later=early, rows_as=rows_as)


def exchanged(
    turns: Turns | None,
    group: ProcessGroup,
    output_splits: Splits,
    input_splits: Splits,
    tensors: Sequence[Tensor],
    deferred: DeferredWeightGradients | None = None,
    *,
    later: bool = False,
    rows_as: RowFormat | None = None,
) -> tuple[Tensor, ...]:
    """Return what `exchange` returns, without a backward pass.

    Args:
        deferred: queues of weight gradients, which are computed meanwhile.
        later: whether the other pass goes on only before the next exchange of this one.
        rows_as: the 8-bit format in which the rows of the first tensor are sent; None sends them as
            they are.
    """
    if turns is not None:
        turns.give_way_if_owed()
    received = []
    works = []
    dtype = tensors[0].dtype
    if rows_as is not None:
        tensors = [rows_as.encode(tensors[0]), *tensors[1:]]
    for tensor in tensors:
        sent = tensor.contiguous()
        into = room_for(sent, output_splits)
        work = torch.distributed.all_to_all_single(
            into,
            sent,
            output_split_sizes=output_splits,
            input_split_sizes=input_splits,
            group=group,
            async_op=True,
        )
        received.append(into)
        works.append((work, sent))
    if deferred is not None:
        deferred.compute_collected()
    if turns is not None:
        (turns.give_way_later if later else turns.give_way)()
    for work, _ in works:
        work.wait()
    if rows_as is not None:
        received[0] = rows_as.decode(received[0], dtype)
    return tuple(received)


def room_for(sent: Tensor, output_splits: Splits) -> Tensor:
    """Return memory, not yet filled, for what an exchange of ``sent`` brings."""
    rows = len(sent) if output_splits is None else int(sum(output_splits))
    return sent.new_empty((rows, *sent.shape[1:]))


@contextmanager
def own_state(dispatcher: AlltoAllDispatcher) -> Iterator[None]:
    """Restore the attributes of a dispatcher after the block.

    The other pass may recompute the same layer in between, and dispatch other tokens.
    """
    state = dict(dispatcher.__dict__)
    yield
    dispatcher.__dict__.update(state)


class _OneRank:
    """Stands for a group of one rank, among which megatron-core exchanges nothing."""

    @staticmethod
    def size() -> int:
        return 1


class OverlappedDispatcher(AlltoAllDispatcher):
    """Dispatcher whose all-to-alls let another micro-batch compute, or send rows in 8 bits.

    It does what the configuration asks for: ``turns``, ``moe_dispatch_fwd_dtype`` and
    ``moe_combine_bwd_dtype``.
    """

    ep_group: Any
    tokens_per_expert: Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._there = RowFormat.of(self.config.moe_dispatch_fwd_dtype), None
        self._back = None, RowFormat.of(self.config.moe_combine_bwd_dtype)

    def token_dispatch(
        self, permutated_local_input_tokens: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, ...]:
        """Send each token ``[tokens, h]`` and its probability ``[tokens]`` to its expert's rank.

        Return the tokens and the probabilities that other ranks have sent to this one.
        """
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_ep_alltoall", self.tokens_per_expert
        )
        tensors = permutated_local_input_tokens, permuted_probs
        splits = self.output_splits, self.input_splits
        received = self._exchange(self.ep_group, tensors, *splits, reads=(True, True))
        with self._sent_already():
            return super().token_dispatch(*received)  # type: ignore[no-any-return]

    def token_combine(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return each expert's outputs ``[tokens, h]`` to the ranks that sent the tokens."""
        splits = self.input_splits, self.output_splits
        (output,) = self._exchange(self.ep_group, (hidden_states,), *splits)
        with self._sent_already():
            return super().token_combine(output, *args, **kwargs)  # type: ignore[no-any-return]

    def _exchange(
        self,
        group: ProcessGroup,
        tensors: Sequence[Tensor],
        output_splits: Splits,
        input_splits: Splits,
        *,
        reads: Sequence[bool] = (False,),
        gives_way: bool = True,
    ) -> tuple[Tensor, ...]:
        """Call `exchange` for this layer, and keep the layer's state meanwhile.

        Args:
            reads: whether the experts read each received tensor, so that they would need it again
                if they are recomputed; see `KeepingDispatcher`.
            gives_way: whether the other pass of a pair goes on meanwhile.
        """
        config = self.config
        turns = config.turns if gives_way else None
        deferred = config.weight_gradients if gives_way else None
        formats = self._formats(reads)
        with own_state(self):
            return exchange(turns, group, tensors, output_splits, input_splits, deferred, formats)

    def _formats(self, reads: Sequence[bool]) -> Formats:
        """Return the formats of rows on their way to experts, or of outputs on their way back.

        The latter bring one tensor, whose gradient goes to the experts.
        """
        return self._there if len(reads) > 1 else self._back

    @contextmanager
    def _sent_already(self) -> Iterator[None]:
        """Inside the block, keep megatron-core from sending tokens, which have been sent."""
        group = self.ep_group
        self.ep_group = _OneRank()
        try:
            yield
        finally:
            self.ep_group = group
