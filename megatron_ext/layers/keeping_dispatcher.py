"""Token dispatchers of recomputed layers that exchange tokens once; see `kept_tokens`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.expert_exchange import (
    OverlappedDispatcher,
    Splits,
    exchanged_back,
    room_for,
)
from megatron_ext.layers.kept_tokens import Kept
from megatron_ext.layers.two_hop_dispatcher import TwoHopDispatcher

COUNTS = (
    "capacity num_out_tokens num_global_tokens_per_local_expert input_splits output_splits "
    "output_splits_tp"
).split()
"""The attributes of a dispatcher that hold numbers of tokens, which all ranks have exchanged."""


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
        keeps_output: whether the sum of each token's outputs is kept, too. If not, the second
            forward pass returns another one, with the right graph.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: Kept | None = None
        self._runs_again = False
        # With selective recomputation, nothing that is run again reads the output, unless it is
        # projected.
        self.projects = self.config.moe_latent_size is not None
        self.keeps_output = self.projects or self.config.recompute_granularity == "full"

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
        there, back = self._formats(reads)
        if not self._runs_again:
            received = super()._exchange(
                group, tensors, output_splits, input_splits, reads=reads, gives_way=gives_way
            )
            values = [x if read else None for x, read in zip(received, reads, strict=True)]
            if there is not None and values[0] is not None:
                # Decoded rows become the same bytes again, which take less memory.
                values[0] = there.encode(values[0])
            kept.setdefault("received", []).append(values)
            return received
        config = self.config
        turns = config.turns if gives_way else None
        deferred = config.weight_gradients if gives_way else None

        def send(gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
            splits = input_splits, output_splits
            return exchanged_back(gradients, turns, group, *splits, deferred, back)

        values = kept["received"].pop(0)
        if there is not None and values[0] is not None:
            values[0] = there.decode(values[0], tensors[0].dtype)
        values = [
            room_for(tensor, output_splits).zero_() if value is None else value
            for tensor, value in zip(tensors, values, strict=True)
        ]
        return _GradientsOnly.apply(send, values, *tensors)  # type: ignore[no-any-return,no-untyped-call]

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the sum of each token's outputs, ``[s, b, h]``: the layer's output.

        With ``--moe-latent-size`` the sum has fewer channels, and is projected to the output.
        """
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


def drop_unread_outputs(chunk: torch.nn.Module, usual: type[torch.nn.Module]) -> None:
    """Let the experts of a model chunk keep no output that their second forward pass does not read.

    It reads the output if a norm or a projection follows, or another layer that is recomputed
    together with this one. Otherwise the output is only added to the residual stream, whose
    gradient does not depend on it. ``usual`` is the class of layers of a decoder that end so.
    """
    for block in chunk.modules():
        if isinstance(block, TransformerBlock) and _recomputes_singly(block.config):
            _drop_outputs([layer for layer in block.layers if type(layer) is usual])


def _recomputes_singly(config: TransformerConfig) -> bool:
    alone = config.recompute_method == "block" or config.recompute_num_layers == 1
    norms = ("sandwich_norm", "reordered_norm")
    return alone and not any(getattr(config, name, False) for name in norms)


def _drop_outputs(layers: Iterable[Any]) -> None:
    for layer in layers:
        dispatcher = getattr(layer.mlp, "token_dispatcher", None)
        if isinstance(dispatcher, KeepingDispatcher):
            dispatcher.keeps_output = dispatcher.projects
