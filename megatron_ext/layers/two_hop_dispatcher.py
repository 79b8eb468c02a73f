"""A token dispatcher that sends a token once to each node, and from there once to each rank.

The all-to-all dispatcher sends a copy of a token for each of its experts, also if several of them
are on one node, which is reached over the slow network. Here a token makes two hops. In the first
one it goes to each node that has some of its experts, to the rank with the sender's place there. In
the second one that rank passes it on to the ranks of its experts, over the links of the node.
Outputs return on the same way: a rank adds up those of its own experts, and the rank of the first
hop those of its node, so that one sum from each node returns. Gradients go the same ways.

An expert gets the same rows in the same order as from the all-to-all dispatcher. The sums have the
same terms, but partial sums of a node, so results are equal bit by bit if a token has two experts,
and differ by the rounding of the sums if it has more.

DeepSeek-V3 (arXiv:2412.19437, section 3.2.2) describes the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_utils import (
    get_align_size_for_quantization,
    pad_routing_map,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.expert_exchange import OverlappedDispatcher
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.expert_hops import ExpertHops

NOT_CHOSEN = float("-inf")
"""The score of an expert that a token is not sent to; no router gives this probability."""


@dataclass(frozen=True)
class _Hop:
    """An exchange in which each row goes once to each rank of a group that needs it.

    Attributes:
        group: the r ranks that exchange rows.
        num_rows: the number of rows that this rank has.
        row: which row each copy is of, sorted by the receiving rank, ``[copies]``.
        receiver: the rank in the group that gets each copy, ``[copies]``.
        sent, received: the number of copies for, and from, each rank of the group.
        exchange: sends rows; `OverlappedDispatcher._exchange`.
    """

    group: ProcessGroup
    num_rows: int
    row: Tensor
    receiver: Tensor
    sent: list[int]
    received: list[int]
    exchange: Callable[..., tuple[Tensor, ...]]

    @classmethod
    def of(
        cls,
        group: ProcessGroup,
        needed: Tensor,
        received: list[int],
        exchange: Callable[..., tuple[Tensor, ...]],
    ) -> _Hop:
        """Return the exchange in which ``needed``, ``[rows, r]``, says who gets which row."""
        receiver, row = needed.T.nonzero(as_tuple=True)
        sent = needed.sum(0).tolist()
        return cls(group, len(needed), row, receiver, sent, received, exchange)

    def send(self, tokens: Tensor, scores: Tensor, *, is_last: bool) -> tuple[Tensor, Tensor]:
        """Send rows ``[rows, h]`` with the scores of the receivers' experts.

        ``scores`` are those of all experts behind this hop, ``[rows, e]``. Return the rows that
        arrive and their scores of this rank's part of the experts, ``[arrived, e / r]``.
        ``is_last`` says that the experts read these rows.
        """
        size = self.group.size()
        copies = tokens.index_select(0, self.row)
        by_receiver = scores.reshape(self.num_rows * size, scores.size(1) // size)
        parts = by_receiver.index_select(0, self.row * size + self.receiver)
        rows, arrived = self.exchange(
            self.group, (copies, parts), self.received, self.sent, reads=(is_last, True)
        )
        return rows, arrived

    def bring_back(self, outputs: Tensor) -> Tensor:
        """Return the outputs of the copies that this rank has sent, ``[copies, h]``."""
        (copies,) = self.exchange(self.group, (outputs,), self.sent, self.received)
        return copies


def _needed(chosen: Tensor, size: int) -> Tensor:
    """Return which of ``size`` equal parts of the e experts each row needs, ``[rows, size]``.

    ``chosen`` says which experts it needs, ``[rows, e]``.
    """
    return chosen.reshape(len(chosen), size, chosen.size(1) // size).any(-1)


def _summed(copies: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Return the sum of the copies ``[copies, h]`` of each row, ``[rows, h]``."""
    sums = copies.new_zeros(num_rows, copies.size(1))
    if torch.are_deterministic_algorithms_enabled():
        return sums.index_add(0, row, copies)
    return sums.scatter_add(0, row.unsqueeze(1).expand_as(copies), copies)


class TwoHopDispatcher(OverlappedDispatcher):
    """Dispatcher that sends each token once to each node of its experts, then to their ranks."""

    ep_rank: int
    hops: ExpertHops
    routing_map: Tensor

    def __init__(self, *args: Any, hops: ExpertHops, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hops = hops
        self.ep_rank = self.ep_group.rank()
        self._ranks_in_node = 1 if hops.inside is None else hops.inside.size()
        self._num_nodes = self.ep_size // self._ranks_in_node
        self._made: list[_Hop] = []

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tell all ranks how many tokens each of them will get.

        Return the tokens ``[tokens, h]``, and their probabilities ``[tokens, e]`` with `NOT_CHOSEN`
        where an expert is not chosen.

        Args:
            hidden_states: ``[s, b, h]``.
            routing_map: which experts each token is sent to, ``[tokens, e]``.
            probs: probabilities of the experts, ``[tokens, e]``.
        """
        if self.config.moe_router_padding_for_quantization:
            multiple = get_align_size_for_quantization(self.config)
            routing_map = pad_routing_map(routing_map, multiple)
        self.hidden_shape = hidden_states.shape
        self.probs = probs
        self.routing_map = routing_map
        counts = self.preprocess(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        self._copies = self._count_copies()
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = tokens.shape
        return tokens, torch.where(routing_map, probs, NOT_CHOSEN)

    def _count_copies(self) -> list[list[int]]:
        """Return how many tokens each expert-parallel rank has for each rank, then for each node.

        A token with several experts on a rank, or on a node, counts once there.
        """
        by_rank = _needed(self.routing_map, self.ep_size)
        by_node = _needed(by_rank, self._num_nodes)
        own = torch.cat([by_rank.sum(0), by_node.sum(0)])
        everyones = own.new_empty(self.ep_size * len(own))
        torch.distributed.all_gather_into_tensor(everyones, own, group=self.ep_group)
        table: list[list[int]] = everyones.view(self.ep_size, -1).tolist()
        return table

    def _senders(self, place: int) -> range:
        """Return the expert-parallel ranks with this place on their nodes."""
        return range(place, self.ep_size, self._ranks_in_node)

    def token_dispatch(self, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Send the tokens to the ranks of their experts.

        Take the results of `dispatch_preprocess`. Return a copy of each token that arrived for each
        of its experts on this rank, ``[copies, h]``, and the probabilities ``[copies]``. If other
        ranks share these experts, copies are sorted by sender, then by expert, as megatron-core has
        them; otherwise by expert, then by sender.
        """
        node, place = divmod(self.ep_rank, self._ranks_in_node)
        self._made = []
        if self.hops.between is not None:
            needed = _needed(self.routing_map, self._num_nodes)
            arriving = [self._copies[x][self.ep_size + node] for x in self._senders(place)]
            tokens, scores = self._send(self.hops.between, needed, arriving, tokens, scores)
        places = range(self._ranks_in_node)
        # Rows arrive from one place after the other, and for each place from one node after the
        # other.
        senders = [sender for other in places for sender in self._senders(other)]
        arriving = [self._copies[sender][self.ep_rank] for sender in senders]
        if self.hops.inside is not None:
            needed = _needed(scores != NOT_CHOSEN, self._ranks_in_node)
            passed_on = [sum(arriving[x * self._num_nodes :][: self._num_nodes]) for x in places]
            tokens, scores = self._send(self.hops.inside, needed, passed_on, tokens, scores)
        copies, probs = self._copied(tokens, scores, senders, arriving)
        with self._sent_already():
            rows, probs = super().token_dispatch(copies, probs)
        return rows, probs

    def _send(
        self,
        group: ProcessGroup,
        needed: Tensor,
        arriving: list[int],
        tokens: Tensor,
        scores: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Make a hop, and remember it for the way back; see `_Hop`."""
        # Pairs of passes take turns at the first hop, which is the slower one if there are two.
        exchange = partial(self._exchange, gives_way=not self._made)
        hop = _Hop.of(group, needed, arriving, exchange)
        self._made.append(hop)
        last = self.hops.between if self.hops.inside is None else self.hops.inside
        return hop.send(tokens, scores, is_last=group is last)

    def _copied(
        self, tokens: Tensor, scores: Tensor, senders: Sequence[int], arriving: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return a copy of each row for each of its experts on this rank, and the probabilities.

        Args:
            tokens: rows that arrived, ``[rows, h]``.
            scores: their scores of this rank's e experts, ``[rows, e]``.
            senders: the ranks that have sent the rows, in the order of the rows.
            arriving: the number of rows from each of them.
        """
        row, expert = (scores != NOT_CHOSEN).nonzero(as_tuple=True)
        numbers = torch.tensor([senders, arriving], device=tokens.device)
        sender = numbers[0].repeat_interleave(numbers[1], output_size=len(tokens))[row]
        if self._arrive_sorted():
            key = expert * self.ep_size + sender
        else:
            key = sender * self.num_local_experts + expert
        order = key.argsort(stable=True)
        row = row[order]
        self._copied_rows = row, len(tokens)
        place = row * self.num_local_experts + expert[order]
        return tokens.index_select(0, row), scores.flatten().index_select(0, place)

    def _arrive_sorted(self) -> bool:
        """Return whether `token_dispatch` sorts tokens by expert: if no ranks share an expert."""
        return self.tp_size == 1

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Add up the outputs of this rank's experts for each row that arrived, ``[rows, h]``."""
        return _summed(super().combine_preprocess(hidden_states), *self._copied_rows)

    def token_combine(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Send the sums back; return a copy for each node that a token was sent to.

        If one node has all experts, return a copy for each rank that a token was sent to.
        """
        first, *later = self._made
        for hop in reversed(later):
            hidden_states = _summed(hop.bring_back(hidden_states), hop.row, hop.num_rows)
        copies = first.bring_back(hidden_states)
        # `combine_postprocess` adds up the copies.
        self.reversed_local_input_permutation_mapping = first.row
        with self._sent_already():
            return super().token_combine(copies, *args, **kwargs)


def use_two_hops(
    chunks: Iterable[torch.nn.Module],
    hops: ExpertHops,
    context: ParallelContext,
    kind: type[TwoHopDispatcher] = TwoHopDispatcher,
) -> None:
    """Make all MoE layers of model chunks that use an all-to-all send their tokens in two hops.

    ``kind`` is the class of their dispatchers.
    """
    layers = (x for chunk in chunks for x in chunk.modules() if isinstance(x, BaseMoELayer))
    for layer in layers:
        old = layer.token_dispatcher
        if isinstance(old, MoEAlltoAllTokenDispatcher):
            layer.token_dispatcher = kind(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=context.pgs,
                hops=hops,
            )
            if old.shared_experts is not None:
                layer.token_dispatcher.set_shared_experts(old.shared_experts)
