"""Attention by torch's kernels for scaled_dot_product_attention (SDPA).

`attend` tries the fastest kernel of the device first. On Hopper and data-center Blackwell GPUs that
is cuDNN's, then FlashAttention 2. On Hopper, FlashAttention 3 precedes both if it is installed
(`use_flash_3`) and there is no mask. cuDNN's kernel is preferred only where it is safe:

- If the numbers of queries and keys are multiples of 128, from cuDNN 9.10.2 on.
- At other lengths without a mask, from 9.15.1 on (pytorch/pytorch, issue 169849).
- At other lengths with a mask, never: gradients may be NaN if a length is an odd multiple of 64
  (issue 196678).

The kernels accept ``[b, n, s, d]`` with a contiguous last axis, and give results the layout of the
queries. So tensors in Megatron's order ``[s, b, n, d]`` are passed as views, and the results are
contiguous in that order. The keys of a query group are not repeated for its queries.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_ext.config.model import ModelConfig
from megatron_ext.errors import ConfigError

logger = logging.getLogger(__name__)

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
WITHOUT_CUDNN = CUDNN_FIRST[1:]
FLASH_FIRST = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *CUDNN_FIRST[2:])
CUDNN_GENERATIONS = (9, 10)
"""Major compute capabilities of Hopper and data-center Blackwell."""

CUDNN_ANY_LENGTH = 91501
CUDNN_OF_TORCH_2_8 = 91002
CUDNN_TILE = 128
"""Positions in a tile of cuDNN's kernels; old versions are safe only at multiples of it.

From version `CUDNN_ANY_LENGTH` on, any sequence length is safe; from `CUDNN_OF_TORCH_2_8` on,
multiples of `CUDNN_TILE` are.
"""

FLASH_3 = "FA3"
"""torch's name for FlashAttention 3."""

FLASH_3_MODULE = "flash_attn_interface"
FLASH_3_GENERATION = 9


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
    """Return ``softmax(query key^T * scale) value``, ``[b, n, q, dv]``, for q queries and k keys.

    Args:
        query: ``[b, n, q, d]``, with contiguous last dimension and any other strides.
        key, value: ``[b, g, k, d]`` and ``[b, g, k, dv]`` with g query groups.
        mask: ``[b, 1, q or 1, k]``, True where a query attends to a key, or a bias object of torch.
        causal: whether queries attend to no later keys; not allowed together with a mask.
        scale: None means ``1 / sqrt(d)``.
        backend: the kernel to use on a GPU; auto uses the fastest one that supports the arguments.

    Raises:
        ConfigError: the kernel of ``backend`` does not support the arguments.
    """
    own = value.size(-1)
    size = max(query.size(-1), value.size(-1))
    if not query.is_cuda and query.size(-1) != own:
        # A CPU's fused kernel needs equal head sizes. Padding with zeros changes neither scores nor
        # values.
        scale = query.size(-1) ** -0.5 if scale is None else scale
        query, key, value = (F.pad(x, (0, size - x.size(-1))) for x in (query, key, value))
        padded = attend(query, key, value, mask=mask, causal=causal, dropout=dropout, scale=scale)
        return padded[..., :own]
    groups = key.size(1)
    alone = query.size(2) == 1 and query.size(1) != groups and not (causal or dropout)
    if alone and (mask is None or type(mask) is Tensor):
        # In generation. As queries of one head, the heads of a group read its keys once.
        grouped = torch.unflatten(query.squeeze(2), 1, (groups, -1))
        together = attend(grouped, key, value, mask=mask, scale=scale, backend=backend)
        return together.flatten(1, 2).unsqueeze(2)
    kernels = kernels_for(query, key, backend, masked=mask is not None, dropout=dropout)
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


def kernels_for(
    query: Tensor,
    key: Tensor,
    backend: AttnBackend,
    *,
    masked: bool = False,
    dropout: float = 0.0,
) -> Sequence[SDPBackend]:
    """Return the kernels to try, in order; an empty sequence leaves the choice to torch.

    ``masked`` says whether there is a mask, with which some kernels are unsafe.

    Raises:
        ConfigError: ``backend`` allows only cuDNN, whose gradients may be NaN with this mask.
    """
    if not query.is_cuda:
        return ()
    lengths = query.size(2), key.size(2)
    unsafe = masked and not _whole_tiles(lengths)
    if backend == AttnBackend.fused and unsafe:
        raise ConfigError(
            f"`--attention-backend` (fused) takes cuDNN, whose gradients with a mask may be NaN "
            f"unless {CUDNN_TILE} divides the numbers of queries ({lengths[0]}) and keys "
            f"({lengths[1]}); use auto."
        )
    if backend in ONLY:
        return ONLY[backend]
    capability = torch.cuda.get_device_capability(query.device)
    version: int = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    order: Sequence[SDPBackend] = ()
    if flash_3_in_use() and not masked:
        order = FLASH_FIRST
    elif prefers_cudnn(capability, version, lengths, masked=masked):
        order = CUDNN_FIRST
    elif unsafe:  # torch's own choice may be cuDNN's kernel
        order = WITHOUT_CUDNN
    if flash_3_in_use() and dropout > 0:  # FlashAttention 3 has no dropout
        order = [kernel for kernel in CUDNN_FIRST if kernel != SDPBackend.FLASH_ATTENTION]
    return order


def prefers_cudnn(
    capability: tuple[int, int], version: int, lengths: Sequence[int], *, masked: bool = False
) -> bool:
    """Return whether cuDNN is fastest on this GPU and safe at these lengths of queries and keys.

    ``version`` is cuDNN's, for example 91501 for 9.15.1. ``masked`` says whether there is a mask,
    with which fewer lengths are safe.
    """
    whole = _whole_tiles(lengths)
    trusted = version >= (CUDNN_OF_TORCH_2_8 if whole else CUDNN_ANY_LENGTH)
    return capability[0] in CUDNN_GENERATIONS and trusted and (whole or not masked)


def _whole_tiles(lengths: Sequence[int]) -> bool:
    return all(length % CUDNN_TILE == 0 for length in lengths)


def use_flash_3(model: ModelConfig, device: torch.device) -> bool:
    """Switch torch's flash kernels to FlashAttention 3, if possible; return whether it is in use.

    It needs an ``--attention-backend`` that allows flash kernels, attention without dropout, a
    Hopper GPU, and an installed FlashAttention 3 that works with this torch (2.11 or newer).
    """
    attention: Any = torch.nn.attention
    names: Any = getattr(attention, "list_flash_attention_impls", list)()
    if (
        device.type != "cuda"
        or model.attention_backend not in ("auto", "flash")
        or model.attention_dropout > 0
        or FLASH_3 not in names
        or importlib.util.find_spec(FLASH_3_MODULE) is None
        or torch.cuda.get_device_capability(device)[0] != FLASH_3_GENERATION
    ):
        return False
    try:
        attention.activate_flash_attention_impl(FLASH_3)
        _try_flash(device)
    except Exception as error:  # any error of a build for another torch
        if flash_3_in_use():
            attention.restore_flash_attention_impl()
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logger.warning(
            "FlashAttention 3 is installed but does not work with torch %s (%s); attention takes "
            "torch's own kernels.",
            torch.__version__,
            reason,
        )
    return flash_3_in_use()


def flash_3_in_use() -> bool:
    """Return whether torch's flash kernels have been switched to FlashAttention 3."""
    current: Any = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    return bool(current() == FLASH_3)


def _try_flash(device: torch.device) -> None:
    """Run the flash kernel forward and backward once, so that an unusable one raises an error."""
    shape = 1, 1, CUDNN_TILE, 64
    x = torch.ones(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    if not bool(torch.isfinite(out).all() & torch.isfinite(gradient).all()):
        raise RuntimeError("its output is not finite")
