"""A cache of the small vectors of multi-latent attention, for models that generate text.

It keeps ``r + dr`` numbers a token, the latent N(c_kv) and the rotated k_r of `latent_attention`,
instead of the keys and values of all heads. For a new token the up-projections are applied to its
query and to the attention's result instead of to all cached tokens (DeepSeek-V2, arXiv:2405.04434,
section 2.1.2): with the rows W_uk and W_uv of a head::

    q . (W_uk c) = (W_uk^T q) . c         sum_j p_j (W_uv c_j) = W_uv (sum_j p_j c_j)

So all heads attend to one key per token, ``(c, k_r)``, whose first r numbers are also its value.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ext.layers.kv_cache import KeyValueCache, TokenRows, Window, attend_in_segments
from megatron_ext.layers.quantized import weight_of


class LatentCache:
    """The small vectors of one layer of multi-latent attention, ``[slots, c, r + dr]``.

    Args:
        attention: the `LatentAttention`, whose weights must not change while the cache is used.
    """

    def __init__(self, cache: KeyValueCache, attention: Any, window: Window) -> None:
        self._cache = cache
        self._attention = attention
        self.vectors = TokenRows(cache.num_slots, cache.capacity(window))
        self._up = _up_projection(attention)

    def attend(self, query_input: Tensor, latent: Tensor, shared: Tensor) -> Tensor:
        """Store the new vectors and return the attention of the queries, ``[T, 1, n * dv]``.

        The arguments are the results of `LatentAttention.small_vectors`.
        """
        attention = self._attention
        tokens = self._cache.tokens
        attend = attention.core_attention.attend_locally
        stores = self._cache.num_slots > 0
        if stores and tokens.only_singles:
            self._store(latent, shared)
            return self._of_singles(attention.queries(query_input, len(shared))).flatten(2)
        query, key, value = attention.heads(query_input, latent, shared)
        if not stores:
            return attend_in_segments(tokens, [], query, key, value, attend).flatten(2)
        # A window's rows are overwritten when new tokens are stored.
        earlier = {
            segment.slot: self._heads(self.vectors.before(segment))
            for segment in tokens.segments[tokens.singles :]
            if segment.start
        }
        self._store(latent, shared)
        done = [self._of_singles(query[: tokens.singles])] if tokens.singles else []
        outputs = attend_in_segments(tokens, done, query, key, value, attend, earlier)
        return outputs.flatten(2)

    def _store(self, latent: Tensor, shared: Tensor) -> None:
        """Store N(c_kv) ``[T, 1, r]`` and k_r before rotation ``[T, 1, dr]`` of the new tokens."""
        attention = self._attention
        if attention.config.sequence_parallel:
            latent = gather_from_sequence_parallel_region(latent, group=attention.tp_group)
        rotated = attention.rotated_shared(shared, len(shared))
        self.vectors.store(torch.cat((latent, rotated), dim=-1)[:, 0], self._cache.tokens)

    def _of_singles(self, query: Tensor) -> Tensor:
        """Attend from the sequences with one new token; return ``[singles, 1, n, dv]``.

        ``query`` is ``[singles, 1, n, dk]``.
        """
        tokens = self._cache.tokens
        keys = self.vectors.of_singles(tokens)
        return self._attended(query, keys, tokens.forbidden(self.vectors.capacity))

    def _attended(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Attend from one query of each sequence; return ``[singles, 1, n, dv]``.

        Args:
            query: ``[singles, 1, n, dk]``.
            keys: the small vectors of k tokens of each sequence, ``[singles, k, r + dr]``.
            mask: ``[singles, 1, 1, k]``, True where attention is forbidden.
        """
        config = self._attention.config
        keys = keys.transpose(0, 1).unsqueeze(2)
        width = config.qk_head_dim
        plain = query[:, 0, :, :width]
        turned = query[:, 0, :, width:]
        key_rows = self._up[:, :width]
        value_rows = self._up[:, width:]
        moved = torch.bmm(plain.transpose(0, 1), key_rows).transpose(0, 1)
        queries = torch.cat((moved, turned), dim=-1).unsqueeze(0)
        attended = self._attention.core_attention.attend_locally(
            queries, keys, keys, mask, first_query=None
        )
        sums = attended[0, ..., : config.kv_lora_rank].transpose(0, 1)
        return torch.bmm(sums, value_rows.transpose(1, 2)).transpose(0, 1).unsqueeze(1)

    def _heads(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's keys ``[e, n, dk]`` and values ``[e, n, dv]`` of e stored tokens."""
        config = self._attention.config
        latent = stored[:, : config.kv_lora_rank]
        turned = stored[:, config.kv_lora_rank :]
        heads = torch.einsum("er,ndr->end", latent, self._up)
        key = heads[..., : config.qk_head_dim]
        value = heads[..., config.qk_head_dim :]
        turned = turned.unsqueeze(1).expand(-1, key.size(1), -1)
        return torch.cat((key, turned), dim=-1), value


def _up_projection(attention: Any) -> Tensor:
    """Return W_ukv of this rank's heads, ``[n, dqk + dv, r]``, with its adapter."""
    layer = attention.linear_kv_up_proj
    weight = weight_of(layer)
    if layer.lora is not None:
        weight = layer.lora.merged(weight).to(weight.dtype)
    return weight.view(attention.num_attention_heads_per_partition, -1, weight.size(-1))
