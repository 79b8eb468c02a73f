"""The lightning indexer of DeepSeek-V3.2 (section 2.1 of its report), which chooses keys.

H small heads score every earlier token s for each token t, and the k tokens with the best scores
are chosen. With the hidden state h of a token, the vector c_q from which multi-latent attention
computes its queries, and rotary embedding of the first channels of q and k::

    q[t] = W_q c_q[t]                       H heads of D channels
    k[s] = LayerNorm(W_k h[s])              D channels, which all heads share
    w[t] = W_w h[t] / sqrt(H D)             H numbers
    score[t, s] = sum over heads j of  w[t, j] relu(q[t, j] . k[s])

The choice of keys has no gradient. The indexer learns to predict the main attention: its loss at a
token is the Kullback-Leibler divergence of ``softmax(score)`` from the attention's probabilities,
averaged over the main attention's heads. Neither h, c_q nor those probabilities get a gradient
from it. Tensor-parallel ranks share the work by queries: each computes the scores of its share of a
block's queries, and their loss, from which probabilities are summed over the ranks' heads.

The scores are float32 (float64 in a float64 model). The published model also turns q and
k by one Hadamard matrix before it rounds them to 8 bits; in exact arithmetic this changes no score.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig, build_module
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.linear import enter, unbiased
from megatron_ext.layers.pointwise import rotated


class IndexVectors(NamedTuple):
    """The vectors from which a sequence's scores are computed.

    Attributes:
        query: ``[s, b, H, D]``, rotated.
        key: ``[s, b, D]``, rotated.
        weights: ``[s, b, H]``, divided by ``sqrt(H D)``.
    """

    query: Tensor
    key: Tensor
    weights: Tensor


@dataclass
class IndexerSubmodules:
    """The modules of a `LightningIndexer`."""

    linear_wq_b: Any
    linear_wk: Any
    k_norm: Any
    linear_weights_proj: Any


class LightningIndexer(MegatronModule):  # type: ignore[misc]
    """The projections of the indexer, whole on every tensor-parallel rank.

    Parameters have megatron-core's names. They are frozen without ``dsa_indexer_loss_coeff``,
    because nothing else gives them a gradient.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: IndexerSubmodules,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.heads = config.dsa_indexer_n_heads
        self.channels = config.dsa_indexer_head_dim
        self.interleaved: bool = getattr(config, "dsa_indexer_rope_interleaved", False)
        hidden = config.hidden_size
        query_inputs = hidden if config.q_lora_rank is None else config.q_lora_rank
        self.linear_wq_b = self._linear(
            submodules.linear_wq_b, query_inputs, self.heads * self.channels
        )
        self.linear_wk = self._linear(submodules.linear_wk, hidden, self.channels)
        own = copy.copy(config)
        own.normalization = "LayerNorm"
        eps = getattr(config, "dsa_indexer_k_norm_epsilon", None)
        eps = config.layernorm_epsilon if eps is None else eps
        self.k_norm = build_module(
            submodules.k_norm, config=own, hidden_size=self.channels, eps=eps
        )
        self.linear_weights_proj = self._linear(submodules.linear_weights_proj, hidden, self.heads)
        if not config.dsa_indexer_loss_coeff:
            self.requires_grad_(False)

    def _linear(self, kind: Any, inputs: int, outputs: int) -> Any:
        return unbiased(kind, inputs, outputs, self.config, self.tp_group)

    def forward(
        self, hidden: Tensor, query_input: Tensor, table: tuple[Tensor | None, Tensor | None]
    ) -> IndexVectors:
        """Return the index vectors of this context-parallel rank's tokens.

        Args:
            hidden: ``[s, b, h]``, or ``[s/tp, b, h]`` under sequence parallelism.
            query_input: c_q, ``[s, b, r]`` or ``[s/tp, b, r]``.
            table: cosines and sines ``[s, 1, 1, d/2]`` of the s tokens; None if nothing is rotated.
        """
        hidden = hidden.detach()
        query, _ = self.linear_wq_b(query_input.detach())
        key, _ = self.linear_wk(hidden)
        key = self.k_norm(key)
        weights, _ = self.linear_weights_proj(hidden)
        if self.tp_group.size() > 1:
            sizes = [query.size(-1), key.size(-1), weights.size(-1)]
            # Each rank has the gradient of its share of the queries.
            entered = enter(
                torch.cat((query, key, weights), dim=-1),
                self.tp_group,
                self.config.sequence_parallel,
            )
            query, key, weights = torch.split(entered, sizes, dim=-1)
        query = torch.unflatten(query, -1, (self.heads, self.channels))
        cos, sin = table
        if cos is not None and sin is not None:
            query = rotated(query, cos, sin, self.interleaved)
            key = rotated(key.unsqueeze(2), cos, sin, self.interleaved).squeeze(2)
        weights = _wide(weights) * (self.heads * self.channels) ** -0.5
        return IndexVectors(query, key, weights)


def rectified_products(query: Tensor, key: Tensor) -> Tensor:
    """Return ``relu(q . k)`` ``[b, q, H, e]`` of q queries and e keys, in float32 or float64.

    Args:
        query: ``[q, b, H, D]``.
        key: ``[e, b, D]``.
    """
    rows = _wide(query).permute(1, 0, 2, 3).flatten(1, 2)
    products = torch.bmm(rows, _wide(key).permute(1, 2, 0))
    return torch.unflatten(products.relu_(), 1, query.shape[0:3:2])


def weighted(products: Tensor, weights: Tensor) -> Tensor:
    """Return the scores ``[b, q, e]``: products ``[b, q, H, e]`` by weights ``[q, b, H]``."""
    return torch.matmul(weights.transpose(0, 1).unsqueeze(2), products).squeeze(2)


def index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Return the scores ``[b, q, e]`` of q queries for e keys, without a gradient.

    Args:
        query: ``[q, b, H, D]``.
        key: ``[e, b, D]``.
        weights: ``[q, b, H]``.
    """
    with torch.no_grad():
        return weighted(rectified_products(query, key), weights)


def chosen_keys(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """Return ``[b, q, e]``, True at the ``count`` best allowed keys of each query.

    Of keys with equal scores the earlier ones are chosen, so that the choice does not depend on
    the kernel that sorts. A query with fewer allowed keys gets all of them.

    Args:
        scores: ``[b, q, e]``.
        allowed: ``[b or 1, q, e]``, True where a query may attend to a key.
    """
    if scores.size(-1) <= count:
        return allowed.expand_as(scores)
    hidden = scores.masked_fill(~allowed, -torch.inf)
    least = hidden.topk(count, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    better = hidden > least
    equal = (hidden == least) & allowed
    room = count - better.sum(dim=-1, keepdim=True)
    return better | (equal & (equal.cumsum(dim=-1) <= room))


def share_of(count: int, group: ProcessGroup) -> slice:
    """Return which of ``count`` queries a rank of the group handles; shares differ by position."""
    most = -(-count // group.size())
    start = min(group.rank() * most, count)
    return slice(start, min(start + most, count))


def gathered_rows(own: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """Return the booleans ``[b, count, e]`` whose rows `share_of` divides among the ranks.

    ``own`` are those of this rank's rows.
    """
    if group.size() == 1:
        return own
    rows = _padded(own.transpose(0, 1).to(torch.uint8), -(-count // group.size()))
    whole: Tensor = gather_from_sequence_parallel_region(rows, group=group)
    return whole[:count].transpose(0, 1).bool()


def attention_target(
    query: Tensor, key: Tensor, within: Tensor, scale: float, tp_group: ProcessGroup
) -> Tensor:
    """Return the main attention's probabilities, averaged over all ranks' heads.

    The result is ``[b, r, e]``, for the r queries of this rank's share.

    Args:
        query: ``[q, b, n, d]`` of this tensor-parallel rank's n heads.
        key: ``[e, b, n, d]``.
        within: ``[b or 1, q, e]``, True at the keys over which the softmax is taken.
        scale: factor of the products of queries and keys.
    """
    q = _wide(query.detach()).permute(1, 2, 0, 3)
    k = _wide(key.detach()).permute(1, 2, 3, 0)
    scores = (q @ k).mul_(scale).masked_fill_(~within.unsqueeze(1), -torch.inf)
    total = scores.softmax(dim=-1).sum(dim=1)
    if tp_group.size() > 1:
        count = len(query)
        rows = _padded(total.transpose(0, 1), -(-count // tp_group.size()) * tp_group.size())
        summed: Tensor = reduce_scatter_to_sequence_parallel_region(rows, group=tp_group)
        share = share_of(count, tp_group)
        total = summed[: share.stop - share.start].transpose(0, 1)
    return total / total.sum(dim=-1, keepdim=True)


def _padded(rows: Tensor, count: int) -> Tensor:
    """Return ``rows`` with zeros after them, ``[count, ...]``."""
    return torch.cat((rows, rows.new_zeros(count - len(rows), *rows.shape[1:])))


class _WithGradients(torch.autograd.Function):
    """A scalar loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: IndexVectors, *_inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *((gradient * own).to(own.dtype) for own in ctx.saved_tensors)


class IndexerLoss:
    """Sums the indexer's loss and its gradients over this rank's shares of blocks of queries.

    The gradients are computed with the loss in the forward pass, so that only one block's
    probabilities exist at a time.

    Args:
        vectors: queries and weights of this rank's tokens, and keys of the whole sequence, in
            sequence order.
    """

    def __init__(self, vectors: IndexVectors, tp_group: ProcessGroup) -> None:
        self.vectors = vectors
        self._tp_group = tp_group
        self._sum = vectors.weights.new_zeros(())
        self._gradients = IndexVectors(
            torch.zeros_like(vectors.query),
            _wide(torch.zeros_like(vectors.key)),
            torch.zeros_like(vectors.weights),
        )

    def products(self, rows: slice, end: int) -> tuple[Tensor, Tensor]:
        """Return the `rectified_products` and the scores of the queries ``rows``.

        ``end`` is the number of their keys.
        """
        query, key, weights = self.vectors
        with torch.no_grad():
            products = rectified_products(query[rows], key[:end])
            return products, weighted(products, weights[rows])

    @torch.no_grad()
    def add(
        self, rows: slice, products: Tensor, scores: Tensor, target: Tensor, within: Tensor
    ) -> None:
        """Add the losses of the queries ``rows``, and their gradients.

        The loss of a query is the Kullback-Leibler divergence of ``softmax(scores)`` from the
        target, whose gradient is ``softmax(scores) - target``.

        Args:
            products, scores: the results of `products`.
            target: probabilities ``[b, q, e]``, 0 outside ``within``.
            within: ``[b or 1, q, e]``, True at the keys that count.
        """
        query, key, weights = self.vectors
        end = scores.size(-1)
        logs = scores.masked_fill(~within, -torch.inf).log_softmax(dim=-1)
        # Differences of logs first: two sums of about the same size would round what is left.
        ratios = target.log().sub_(logs)
        self._sum += torch.where(target > 0, target * ratios, 0.0).sum()
        change = logs.exp_().sub_(target)
        of_weights = torch.matmul(products, change.unsqueeze(-1)).squeeze(-1)
        own = weights[rows].transpose(0, 1)
        of_products = (products > 0) * (own.unsqueeze(-1) * change.unsqueeze(2))
        by_row = of_products.flatten(1, 2)
        of_query = torch.bmm(by_row, _wide(key[:end]).transpose(0, 1))
        queries = _wide(query[rows]).permute(1, 0, 2, 3).flatten(1, 2)
        of_key = torch.bmm(by_row.transpose(1, 2), queries)
        of_query = torch.unflatten(of_query, 1, products.shape[1:3])
        self._gradients.query[rows] = of_query.permute(1, 0, 2, 3).to(query.dtype)
        self._gradients.key[:end] += of_key.transpose(0, 1)
        self._gradients.weights[rows] = of_weights.transpose(0, 1)

    def total(self) -> Tensor:
        """Return the sum of all losses, a scalar that autograd connects with the vectors.

        Tensor-parallel ranks get the sum over their shares, each with the gradients of its own.
        """
        if self._tp_group.size() > 1:
            torch.distributed.all_reduce(self._sum, group=self._tp_group)
        loss: Tensor = _WithGradients.apply(self._sum, self._gradients, *self.vectors)  # type: ignore[no-untyped-call]
        return loss


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or as it is if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
