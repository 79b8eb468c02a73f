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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.expert_exchange import OverlappedDispatcher, Splits, exchanged
from megatron_ext.layers.transformer_layer import TransformerLayer
from megatron_ext.layers.two_hop_dispatcher import TwoHopDispatcher

Kept = dict[str, Any]
"""What one layer keeps of one forward pass, by names that its dispatcher chooses."""

Record = dict[OverlappedDispatcher, list[Kept]]
"""What the layers of a model chunk keep of one forward pass of the chunk."""

COUNTS = (
    "capacity num_out_tokens num_global_tokens_per_local_expert input_splits output_splits "
    "output_splits_tp"
).split()
"""The attributes of a dispatcher that hold numbers of tokens, which all ranks have exchanged."""


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
        for block in chunk.modules():
            if isinstance(block, TransformerBlock):
                _drop_unread_outputs(block)

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

    def of_pass(self, dispatcher: OverlappedDispatcher) -> tuple[Kept | None, bool]:
        """Return what a layer keeps of its current pass, and whether this is the second pass.

        Return None if it keeps nothing, since it is not recomputed. In the first pass the result is
        empty, and the layer fills it.
        """
        if not torch.is_grad_enabled():
            # Core computes recomputed layers without gradients at first.
            if self._forward is None:
                return None, False
            kept: Kept = {}
            self._forward.setdefault(dispatcher, []).append(kept)
            return kept, False
        # A layer may be recomputed in some micro-batches only: forward passes take nothing.
        in_backward = torch._C._current_graph_task_id() != -1
        waiting = self._backward.get(dispatcher) if in_backward else None
        return (waiting.pop(), True) if waiting else (None, False)


def _drop_unread_outputs(block: TransformerBlock) -> None:
    """Let the experts of a block keep no output that their second forward pass does not read.

    It reads the output if a norm follows, or another layer that is recomputed together with this
    one. Otherwise the output is only added to the residual stream, whose gradient does not depend
    on it.
    """
    config = block.config
    alone = config.recompute_method == "block" or config.recompute_num_layers == 1
    if not alone or getattr(config, "sandwich_norm", False):
        return
    for layer in block.layers:
        dispatcher = getattr(getattr(layer, "mlp", None), "token_dispatcher", None)
        if type(layer) is TransformerLayer and isinstance(dispatcher, KeepingDispatcher):
            dispatcher.keeps_output = False


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


class _GradientsOnly(torch.autograd.Function):
    """Returns ``values`` instead of what an exchange would bring; sends gradients as it would.

    ``send`` takes the gradients, and returns those of the tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        send: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
        values: Sequence[Tensor],
        *_tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.send = send
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.send(gradients)


class KeepingDispatcher(OverlappedDispatcher):
    """Dispatcher that exchanges the tokens of a recomputed layer once.

    Attributes:
        keeps_output: whether the layer's output is kept, too. If not, the second forward pass
            returns another one, with the right graph.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: Kept | None = None
        self._runs_again = False
        # With selective recomputation, nothing of the layer comes after the output.
        self.keeps_output = self.config.recompute_granularity == "full"

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Call the base class's method; in the second pass without exchanging numbers of tokens."""
        self._kept, self._runs_again = self.config.kept_tokens.of_pass(self)
        routing_map = self._once("routing_map", lambda: routing_map)
        return super().dispatch_preprocess(hidden_states, routing_map, probs)  # type: ignore[no-any-return]

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return a value of the first pass; ``compute`` makes it."""
        if self._kept is None:
            return compute()
        if not self._runs_again:
            self._kept[name] = compute()
        return self._kept[name]

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Return the number of tokens of each expert of this rank; see megatron-core's method."""

        def counted() -> tuple[Tensor, dict[str, Any]]:
            tokens = super(KeepingDispatcher, self).preprocess(routing_map)
            return tokens, {name: getattr(self, name, None) for name in COUNTS}

        tokens, counts = self._once("counts", counted)
        self.__dict__.update(counts)
        return tokens  # type: ignore[no-any-return]

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
        """Exchange tensors in the first pass; in the second one return those that the experts read.

        The others are zeros.
        """
        kept = self._kept
        if kept is None or group.size() == 1:
            return super()._exchange(
                group, tensors, output_splits, input_splits, reads=reads, gives_way=gives_way
            )
        if not self._runs_again:
            received = super()._exchange(
                group, tensors, output_splits, input_splits, gives_way=gives_way
            )
            kept.setdefault("received", []).append(
                [x if read else None for x, read in zip(received, reads, strict=True)]
            )
            return received
        config = self.config
        turns = config.turns if gives_way else None
        deferred = config.weight_gradients if gives_way else None

        def send(gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return exchanged(turns, group, input_splits, output_splits, gradients, deferred)

        values = [
            self._zeros(tensor, output_splits) if value is None else value
            for tensor, value in zip(tensors, kept["received"].pop(0), strict=True)
        ]
        return _GradientsOnly.apply(send, values, *tensors)  # type: ignore[no-any-return,no-untyped-call]

    @staticmethod
    def _zeros(sent: Tensor, output_splits: Splits) -> Tensor:
        """Return zeros in the shape of what an exchange of ``sent`` brings."""
        rows = len(sent) if output_splits is None else int(sum(output_splits))
        return sent.new_zeros(rows, *sent.shape[1:])

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the layer's output ``[s, b, h]``, the sum of each token's outputs."""
        output: Tensor = super().combine_postprocess(hidden_states)
        kept = self._kept
        self._kept = None
        if kept is None or not self.keeps_output:
            return output
        if self._runs_again:
            return _Instead.apply(output, kept["output"])  # type: ignore[no-any-return,no-untyped-call]
        kept["output"] = output
        return output


class _Instead(torch.autograd.Function):
    """Returns ``value`` instead of ``output``, which gets its gradient."""

    @staticmethod
    def forward(_ctx: Any, _output: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class KeepingTwoHopDispatcher(KeepingDispatcher, TwoHopDispatcher):
    """Dispatcher in two hops that exchanges the tokens of a recomputed layer once.

    The rows of the last hop are kept, and the scores of both.
    """

    def _count_copies(self) -> list[list[int]]:
        return self._once("copies", super()._count_copies)  # type: ignore[no-any-return]
