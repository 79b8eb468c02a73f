"""A cache of sparse attention, for models that generate text.

Beside the small vectors of `layers.latent_cache` it keeps the key of the indexer of each token, D
numbers. A new token's query reads all index keys, but only the small vectors of the k keys that it
chooses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers.kv_cache import KeyValueCache, TokenRows
from megatron_ext.layers.latent_cache import LatentCache
from megatron_ext.layers.mixers.lightning_indexer import IndexVectors, chosen_keys, index_scores


class SparseLatentCache(LatentCache):
    """The small vectors ``[slots, c, r + dr]`` and index keys ``[slots, c, D]`` of one layer.

    Args:
        attention: the `SparseLatentAttention`, whose weights must not change while the cache is
            used.
    """

    def __init__(self, cache: KeyValueCache, attention: Any) -> None:
        super().__init__(cache, attention, None)
        self.index_keys = TokenRows(cache.num_slots, cache.capacity(None))

    def attend(  # type: ignore[override]
        self, query_input: Tensor, latent: Tensor, shared: Tensor, index: IndexVectors
    ) -> Tensor:
        """Store the new vectors and return the attention of the queries, ``[T, 1, n * dv]``.

        Args:
            query_input, latent, shared: the results of `LatentAttention.small_vectors`.
            index: the index vectors of the T new tokens.
        """
        attention = self._attention
        tokens = self._cache.tokens
        stores = self._cache.num_slots > 0
        if stores and tokens.only_singles:
            self._store(latent, shared)
            self.index_keys.store(index.key[:, 0], tokens)
            return self._of_chosen(attention.queries(query_input, len(shared)), index).flatten(2)
        query, key, value = attention.heads(query_input, latent, shared)
        outputs = []
        singles = 0
        if stores:
            self._store(latent, shared)
            self.index_keys.store(index.key[:, 0], tokens)
            singles = tokens.singles
        if singles:
            outputs.append(self._of_chosen(query[:singles], index))
        start = singles
        for segment in tokens.segments[singles:]:
            own = slice(start, start + segment.length)
            keys = key[own]
            values = value[own]
            index_keys = index.key[own]
            if segment.start:
                earlier = self._heads(self.vectors.before(segment))
                keys = torch.cat((earlier[0].unsqueeze(1), keys))
                values = torch.cat((earlier[1].unsqueeze(1), values))
                index_keys = torch.cat((self.index_keys.before(segment).unsqueeze(1), index_keys))
            of_segment = IndexVectors(index.query[own], index_keys, index.weights[own])
            outputs.append(
                attention.core_attention.attend_after(
                    query[own], keys, values, of_segment, segment.start
                )
            )
            start += segment.length
        if start < tokens.length:
            outputs.append(query.new_zeros(tokens.length - start, *value.shape[1:]))
        return torch.cat(outputs).flatten(2)

    def _of_chosen(self, query: Tensor, index: IndexVectors) -> Tensor:
        """Attend from the sequences with one new token; return ``[singles, 1, n, dv]``.

        Args:
            query: ``[singles, 1, n, dk]``.
            index: index vectors of the new tokens; those of these sequences come first.
        """
        tokens = self._cache.tokens
        topk: int = self._attention.core_attention.topk
        if tokens.num_keys(self.vectors.capacity) <= topk:
            return self._of_singles(query)
        singles = tokens.singles
        allowed = ~tokens.forbidden(self.vectors.capacity)[:, 0]
        scores = index_scores(
            index.query[:singles].transpose(0, 1),
            self.index_keys.of_singles(tokens).transpose(0, 1),
            index.weights[:singles].transpose(0, 1),
        )
        chosen = chosen_keys(scores, allowed, topk)[:, 0]
        # A short sequence has fewer chosen keys, after which others follow.
        places = chosen.to(torch.uint8).topk(topk, dim=-1).indices
        vectors = self.vectors.of_singles(tokens)
        keys = vectors.gather(1, places.unsqueeze(-1).expand(-1, -1, vectors.size(-1)))
        return self._attended(query, keys, ~chosen.gather(1, places)[:, None, None])
