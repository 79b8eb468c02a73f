"""Attention by torch's kernels: scaled_dot_product_attention, and FlexAttention for masks on a GPU.

`attend` tries the fastest kernel of the device first. On Hopper and data-center Blackwell GPUs
cuDNN's is tried first, then FlashAttention 2. torch prefers cuDNN only from version 9.15.1 on,
since it does not trust older ones at lengths that 128 does not divide (pytorch/pytorch, issue
169849). Both kernels accept ``[b, n, s, d]``, in which only the last axis must be contiguous, and
lay out results like the queries. Tensors in Megatron's order ``[s, b, n, d]`` are therefore passed
as views and come back contiguous. The keys of a query group are not repeated for its queries.

`flex_attend` skips fully masked blocks; given a dense mask, SDPA's kernels compute these too. A
summary of the mask in blocks of 128 x 128 is made once for all layers; the mask itself is read only
in partly masked blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron_ext.errors import ConfigError
from megatron_ext.layers.compiled import compiles

ONLY: Mapping[AttnBackend, tuple[SDPBackend, ...]] = {
    AttnBackend.flash: (SDPBackend.FLASH_ATTENTION,),
    AttnBackend.fused: (SDPBackend.CUDNN_ATTENTION,),
    AttnBackend.unfused: (SDPBackend.MATH,),
}
"""The kernels that ``--attention-backend`` allows; "fused" is Megatron-LM's name for cuDNN."""

CUDNN_FIRST = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
CUDNN_GENERATIONS = (9, 10)
"""Major compute capabilities of Hopper and data-center Blackwell."""

CUDNN_ANY_LENGTH = 91501
CUDNN_OF_TORCH_2_8 = 91002
TILE = 128


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Any = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    backend: AttnBackend = AttnBackend.auto,
) -> Tensor:
    """Return ``softmax(query key^T * scale) value``, ``[b, n, q, d]``, for q queries and k keys.

    Args:
        query: ``[b, n, q, d]``, with contiguous last dimension and any other strides.
        key, value: ``[b, g, k, d]`` with g query groups.
        mask: ``[b, 1, q, k]``, True where a query attends to a key, or a bias object of torch.
        causal: queries attend to no later keys; not together with a mask.
        scale: None means ``1 / sqrt(d)``.
        backend: the kernel to use on a GPU; auto takes the fastest that supports the arguments.

    Raises:
        ConfigError: the kernel of ``backend`` does not support the arguments.
    """
    kernels = kernels_for(query, key, backend)
    chosen = sdpa_kernel(list(kernels), set_priority=True) if kernels else contextlib.nullcontext()
    try:
        with chosen:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=causal,
                scale=scale,
                enable_gqa=query.size(1) != key.size(1),
            )
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise ConfigError(
            f"`--attention-backend` ({backend.name}) has no kernel for {query.dtype} queries of "
            f"shape {list(query.shape)} {'without' if mask is None else 'with'} a mask and with "
            f"dropout {dropout}, for the reasons in torch's warnings above; use auto."
        ) from error


def kernels_for(query: Tensor, key: Tensor, backend: AttnBackend) -> Sequence[SDPBackend]:
    """Return the kernels to try, in order; an empty sequence leaves the choice to torch."""
    if not query.is_cuda:
        return ()
    if backend in ONLY:
        return ONLY[backend]
    lengths = query.size(2), key.size(2)
    capability = torch.cuda.get_device_capability(query.device)
    version: int = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return CUDNN_FIRST if prefers_cudnn(capability, version, lengths) else ()


def prefers_cudnn(capability: tuple[int, int], version: int, lengths: Sequence[int]) -> bool:
    """Return whether cuDNN is fastest on this GPU and safe at these lengths of queries and keys.

    ``version`` is cuDNN's, for example 91501 for 9.15.1.
    """
    whole_tiles = all(length % TILE == 0 for length in lengths)
    trusted = version >= (CUDNN_OF_TORCH_2_8 if whole_tiles else CUDNN_ANY_LENGTH)
    return capability[0] in CUDNN_GENERATIONS and trusted


@dataclass(frozen=True)
class Span:
    """The rule by which the positions of query and key allow or forbid attention.

    Attributes:
        first_query: position of the first query; the first key is at position 0.
        causal: forbid keys after the query.
        window: greatest distance to keys on the left and, unless causal, on the right; -1 or None
            allows any distance.
    """

    first_query: int
    causal: bool
    window: tuple[int, int] | None


def flex_fits(query: Tensor, dropout: float) -> bool:
    """Return whether `flex_attend` supports queries ``[b, n, q, d]`` with this dropout.

    It needs a GPU with a compiler, 16-bit queries, no dropout, and a head size of at least 16 that
    is a power of 2, as torch before 2.7 requires.
    """
    d = query.size(-1)
    is_power = d >= 16 and d & (d - 1) == 0
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and is_power and dropout == 0 and compiles(query)


def flex_attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Return the attention ``[b, n, q, d]`` of q queries over the keys that the mask allows."""
    out: Tensor = compiled_flex_attention()(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=query.size(1) != key.size(1)
    )
    return out


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Return FlexAttention compiled to one kernel; uncompiled it would store all scores."""
    return torch.compile(flex_attention)


def block_mask(query: Tensor, key: Tensor, span: Span, forbidden: Tensor | None) -> BlockMask:
    """Return the block mask for queries ``[b, n, q, d]`` and keys ``[b, g, k, d]``, cached.

    Attention is forbidden by ``span``, and where ``forbidden`` ``[b or 1, 1, q, k]`` is True; if
    that is None, by ``span`` alone.
    """
    lengths = query.size(2), key.size(2)
    if forbidden is None:
        return _of_positions(span, lengths, query.device)
    if forbidden.is_cuda and torch.cuda.is_current_stream_capturing():
        # A replayed CUDA graph must make the blocks from what its inputs hold then.
        return _made(span, lengths, query.device, forbidden)
    return _newest.find(span, lengths, forbidden)


def _made(
    span: Span, lengths: tuple[int, int], device: torch.device, forbidden: Tensor | None
) -> BlockMask:
    batch = None if forbidden is None or forbidden.size(0) == 1 else forbidden.size(0)
    # Every plain number in a mask's function would cost a compilation of its own.
    first_query = torch.full((), span.first_query, device=device)
    rule = _rule(span, first_query, forbidden)
    return create_block_mask(rule, batch, None, *lengths, device=str(device))


@lru_cache(maxsize=16)
def _of_positions(span: Span, lengths: tuple[int, int], device: torch.device) -> BlockMask:
    return _made(span, lengths, device, None)


class _NewestMask:
    """Cache of block masks, made from the newest dense mask and its context-parallel parts.

    The key is the mask's storage address and version, since recomputed layers get the mask as
    another tensor object. The cache holds a reference, so that the storage is not reused.
    """

    def __init__(self) -> None:
        self._held: Tensor | None = None
        self._key: tuple[Any, ...] = ()
        self._made: dict[Any, BlockMask] = {}

    def find(self, span: Span, lengths: tuple[int, int], forbidden: Tensor) -> BlockMask:
        """Return the block mask of ``forbidden``, a dense mask (or part) ``[b or 1, 1, q, k]``."""
        version = 0 if forbidden.is_inference() else forbidden._version
        key = (forbidden.untyped_storage().data_ptr(), version, forbidden.device)
        if key != self._key:
            self._held, self._key, self._made = forbidden, key, {}
        part = (forbidden.storage_offset(), forbidden.shape, forbidden.stride(), span, lengths)
        if part not in self._made:
            self._made[part] = _made(span, lengths, forbidden.device, forbidden)
        return self._made[part]


_newest = _NewestMask()


def _rule(
    span: Span, first_query: Tensor, forbidden: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the function of (b, h, q, k) that is True where query q attends to key k."""
    (left, right), causal = span.window or (-1, -1), span.causal
    per_sample = forbidden is not None and forbidden.size(0) > 1

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # Positions of keys stay alone, or their differences would be made for all pairs in int64.
        at = q + first_query
        seen = k <= at if causal else k >= 0
        if left >= 0:
            seen = seen & (k >= at - left)
        if right >= 0 and not causal:
            seen = seen & (k <= at + right)
        if forbidden is not None:
            seen = seen & ~(forbidden[b, 0, q, k] if per_sample else forbidden[0, 0, q, k])
        return seen

    return allowed
