"""Masked attention on a GPU through torch's FlexAttention, which skips what no query sees.

A dense mask leaves SDPA its slower kernels only, which compute forbidden scores too: with documents
of an eighth of the sequence sixteen times as many as are allowed. Here the mask is summed up in
blocks of 128 x 128 once for each mask, and shared by the layers; blocks that no query sees are
skipped, and the mask itself is read in those that are partly seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._triton import has_triton

NUM_KEPT = 4
"""Block masks kept: of a context-parallel rank's two chunks, with and without a window."""


@dataclass(frozen=True)
class Span:
    """Which keys a query sees by its position.

    Attributes:
        first_query: position of the first query; the keys start at 0.
        causal: no later key.
        window: how far it sees to the left and, unless causal, to the right; -1 is any distance.
    """

    first_query: int
    causal: bool
    window: tuple[int, int] | None


class DenseMask:
    """A mask ``[b or 1, 1, q, k]``, True where forbidden, compared by place and version in memory.

    The tensor is held, so that its place cannot become another mask's meanwhile; recomputed layers
    see it as another tensor in the same place.
    """

    def __init__(self, forbidden: Tensor) -> None:
        self.forbidden = forbidden
        version = 0 if forbidden.is_inference() else forbidden._version
        place = (forbidden.data_ptr(), version, forbidden.device)
        self._key = (*place, forbidden.shape, forbidden.stride())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DenseMask) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def fits(query: Tensor, dropout: float) -> bool:
    """Whether FlexAttention takes the queries ``[b, n, q, d]`` of a GPU.

    It has no dropout, and before torch 2.7 head sizes that are powers of 2 only.
    """
    d = query.size(-1)
    is_power = d >= 16 and d & (d - 1) == 0
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and is_power and dropout == 0 and has_triton()


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """``softmax(q k * scale) v`` where the mask allows it.

    Args:
        query: ``[b, n, q, d]``.
        key: ``[b, g, k, d]``.
        value: ``[b, g, k, d]``.
        mask: see `block_mask`.
        scale: of the scores.

    Returns:
        ``[b, n, q, d]``.
    """
    out: Tensor = compiled()(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=query.size(1) != key.size(1)
    )
    return out


@cache
def compiled() -> Callable[..., Any]:
    """FlexAttention as one kernel; uncompiled it makes all scores."""
    return torch.compile(flex_attention)


def block_mask(query: Tensor, key: Tensor, span: Span, forbidden: Tensor | None) -> BlockMask:
    """The block mask of ``[b, n, q, d]`` and ``[b, g, k, d]``, made at its first use.

    Args:
        query, key: of which the lengths and the device count.
        span: see there.
        forbidden: ``[b or 1, 1, q, k]``, True where forbidden; None is none.
    """
    dense = None if forbidden is None else DenseMask(forbidden)
    return _made(span, dense, query.size(2), key.size(2), query.device)


@lru_cache(maxsize=NUM_KEPT)
def _made(
    span: Span, dense: DenseMask | None, q_len: int, k_len: int, device: torch.device
) -> BlockMask:
    forbidden = None if dense is None else dense.forbidden
    batch = None if forbidden is None or forbidden.size(0) == 1 else forbidden.size(0)
    rule = _rule(span, forbidden)
    return create_block_mask(rule, batch, None, q_len, k_len, device=str(device))


def _rule(
    span: Span, forbidden: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether query q of sample b sees key k."""
    left, right = span.window or (-1, -1)
    per_sample = forbidden is not None and forbidden.size(0) > 1

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q + span.first_query - k
        seen = distance >= 0 if span.causal else k >= 0
        if left >= 0:
            seen = seen & (distance <= left)
        if right >= 0 and not span.causal:
            seen = seen & (-distance <= right)
        if forbidden is not None:
            seen = seen & ~(forbidden[b, 0, q, k] if per_sample else forbidden[0, 0, q, k])
        return seen

    return allowed
