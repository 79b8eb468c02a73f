"""The largest logit of each head of attention, without a matrix of all logits.

A logit is the scaled product of a query and a key that attention allows, before a soft cap. The
fused kernels of attention do not return logits, so they are multiplied here once more: by one
kernel of FlexAttention where that can be used, else for a block of queries at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers import masks
from megatron_ext.layers.attention import HALF, DotProductAttention
from megatron_ext.layers.hooks import in_backward
from megatron_ext.layers.masks import is_dense

BLOCK = {"cpu": 2**22, "cuda": 2**25}
"""Number of logits that a device computes at once, unless those of `LEAST_QUERIES` are more.

A CPU keeps them in its cache; a GPU needs fewer launches.
"""
LEAST_QUERIES = 64
PRODUCES_SINGLE = torch.__version__ >= "2.8"
"""Whether torch multiplies 16-bit matrices on a GPU to a float32 result."""


class LogitMaxima:
    """Follows the largest logit of each head of one attention, in all its forward passes.

    Left out are passes of an evaluation, those that a backward pass repeats, and those with made-up
    inputs before CUDA graphs are recorded.

    Args:
        attention: core attention whose method ``attend_locally`` is replaced by `attend`.
        num_heads: number n of its heads on this tensor-parallel rank.
        device: the device of its queries.

    Attributes:
        values: the largest logits of this rank's heads since `restart`, float32 ``[n]``. Under
            context parallelism a rank sees only a part of the queries, or of the heads.
    """

    def __init__(
        self, attention: DotProductAttention, num_heads: int, device: torch.device
    ) -> None:
        self._attention = attention
        self._attend = attention.attend_locally
        self.values = torch.full((num_heads,), -math.inf, device=device)
        attention.attend_locally = self.attend  # type: ignore[method-assign]

    def restart(self) -> None:
        """Forget all logits so far."""
        self.values.fill_(-math.inf)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        first_query: int | None,
    ) -> Tensor:
        """Attend as `DotProductAttention.attend_locally` does, and note the largest logits."""
        attention = self._attention
        if attention.training and not in_backward() and not _warms_up(query.device):
            # Without a position, the mask contains all rules.
            position = first_query or 0
            with torch.no_grad():
                own = largest_logits(attention, query, key, mask, first_query=position)
                heads = len(own)
                # If context-parallel ranks exchange heads, each attends for some of the heads.
                first = attention.cp_group.rank() * heads if heads < len(self.values) else 0
                known = self.values[first : first + heads]
                torch.maximum(known, own, out=known)
        return self._attend(query, key, value, mask, first_query=first_query)


def _warms_up(device: torch.device) -> bool:
    """Return whether layers run on made-up inputs before CUDA graphs of them are recorded."""
    return masks.newest.keeps_apart(device) and not masks.is_captured(device)


def largest_logits(
    attention: DotProductAttention,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    *,
    first_query: int,
) -> Tensor:
    """Return the largest logit of each head over all queries and samples, float32 ``[n]``.

    It is -inf if the head's queries attend to no key, and NaN if any of its logits is NaN. The
    arguments are those of `DotProductAttention.attend_locally`.
    """
    blocks = _block_mask(attention, query, key, mask, first_query)
    if blocks is not None:
        from megatron_ext.layers.flex_attention import largest_scores

        of_queries: Tensor = largest_scores(query, key, blocks, attention.softmax_scale)
        return of_queries.amax(dim=(0, 2))
    if query.device.type == "cpu" and query.dtype in HALF:
        query = query.float()
        key = key.float()
    length, batch, heads, _ = query.shape
    num_keys, _, groups, _ = key.shape
    repeats = heads // groups
    block = BLOCK[query.device.type]
    size = min(length, max(LEAST_QUERIES, block // (heads * num_keys)))
    width = max(1, block // (repeats * size * num_keys))
    largest = torch.full((heads,), -math.inf, device=query.device)
    for sample in range(batch):
        for start in range(0, length, size):
            rows = slice(start, min(start + size, length))
            forbidden, reach = _forbidden(attention, mask, sample, rows, first_query, key)
            for group in range(0, groups, width):
                keys = key[:reach, sample, group : group + width].permute(1, 2, 0)
                own = slice(group * repeats, (group + width) * repeats)
                queries = query[rows, sample, own].transpose(0, 1)
                # The heads of a group, one below the other, multiply its keys together.
                logits = _product(queries.reshape(len(keys), -1, keys.size(1)), keys)
                logits = logits.view(len(queries), -1, reach)
                if forbidden is not None:
                    last = logits[..., reach - forbidden.size(1) :]
                    last.masked_fill_(forbidden, -math.inf)
                known = largest[own]
                torch.maximum(known, logits.amax(dim=(1, 2)).float(), out=known)
    return largest * attention.softmax_scale


def _block_mask(
    attention: DotProductAttention,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    first_query: int,
) -> Any:
    """Return the block mask with which FlexAttention finds the logits; None if it cannot.

    A block mask of a dense mask would itself be made from all pairs.
    """
    if is_dense(mask):
        return None
    from megatron_ext.layers import flex_attention as flex

    q, k = (x.permute(1, 2, 0, 3) for x in (query, key))
    if not (flex.FINDS_LARGEST and flex.flex_fits(q, 0.0)):
        return None
    causal = attention.causal or mask is not None
    return flex.block_mask(q, k, flex.Span(first_query, causal, attention.window_size), mask)


def _product(queries: Tensor, keys: Tensor) -> Tensor:
    """Return ``[g, q, k]`` for queries ``[g, q, d]`` and keys ``[g, d, k]``.

    It is float32 even for 16-bit inputs on a GPU, where torch can do so.
    """
    if queries.is_cuda and queries.dtype in HALF and PRODUCES_SINGLE:
        options: Any = {"out_dtype": torch.float32}
        return torch.bmm(queries, keys, **options)
    return torch.bmm(queries, keys)


def _forbidden(
    attention: DotProductAttention,
    mask: Tensor | None,
    sample: int,
    rows: slice,
    first_query: int,
    key: Tensor,
) -> tuple[Tensor | None, int]:
    """Return where attention is forbidden to some queries of a sample, and a number r of keys.

    Later keys than the first r are forbidden to all these queries. The tensor ``[q, k]`` is True
    at forbidden pairs of the queries ``rows`` with the last k of the r keys; pairs with earlier
    keys are allowed. It is None if all pairs are allowed.
    """
    window = attention.window_size
    by_document = mask is not None and not is_dense(mask)
    # A dense mask already contains causality.
    causal = by_document or (attention.causal and (mask is None or window is not None))
    first = first_query + rows.start
    last = first_query + rows.stop
    reach = min(last, len(key)) if causal else len(key)
    queries = torch.arange(first, last, device=key.device)[:, None]
    if mask is None and window is None:
        later = torch.arange(first, reach, device=key.device) > queries
        return (later if causal else None), reach
    keys = torch.arange(reach, device=key.device)
    forbidden = keys > queries if causal else torch.zeros_like(keys > queries)
    if window is not None:
        left, right = window
        if left >= 0:
            forbidden |= keys < queries - left
        if right >= 0 and not attention.causal:
            forbidden |= keys > queries + right
    if is_dense(mask):
        forbidden |= mask[sample % len(mask), 0, rows, :reach]
    elif mask is not None:
        own = mask[sample % len(mask)]
        forbidden |= own[first:last, None] != own[:reach]
    return forbidden, reach
