"""torch's scaled_dot_product_attention with the kernel that is fastest on the device tried first.

On Hopper and data-center Blackwell GPUs cuDNN's kernels come before FlashAttention 2, which was
written for the GPUs before them; torch orders them so by itself only from cuDNN 9.15.1 on, whose
predecessors it distrusts at lengths that 128 does not divide (pytorch/pytorch, issue 169849). A
kernel that does not fit a call is passed over, up to the products written out.

None of cuDNN's and FlashAttention's kernels needs a copy: both take any strides of ``[b, n, s, d]``
but the last, and return their output in the queries' layout, so that tensors in Megatron's order
``[s, b, n, d]`` go in as views and come back contiguous. Grouped keys are not repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_ext.errors import ConfigError

ONLY: Mapping[AttnBackend, tuple[SDPBackend, ...]] = {
    AttnBackend.flash: (SDPBackend.FLASH_ATTENTION,),
    AttnBackend.fused: (SDPBackend.CUDNN_ATTENTION,),
    AttnBackend.unfused: (SDPBackend.MATH,),
}
"""What ``--attention-backend`` leaves; "fused" is Megatron-LM's word for cuDNN."""

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
    """``softmax(q k * scale) v``.

    Args:
        query: ``[b, n, q, d]``, of any strides but the last.
        key: ``[b, g, k, d]``, g groups of keys and values.
        value: ``[b, g, k, d]``.
        mask: True where a query sees a key, ``[b, 1, q, k]``, or a bias of torch; None is none.
        causal: queries see no later keys; not with a mask.
        dropout: of the probabilities.
        scale: None means ``1 / sqrt(d)``.
        backend: the only kernel to take on a GPU; auto takes the fastest that fits.

    Returns:
        ``[b, n, q, d]``.

    Raises:
        ConfigError: the only kernel does not fit.
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
    """The kernels to try, in order; none leaves it to torch."""
    if not query.is_cuda:
        return ()
    if backend in ONLY:
        return ONLY[backend]
    lengths = query.size(2), key.size(2)
    capability = torch.cuda.get_device_capability(query.device)
    version: int = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return CUDNN_FIRST if prefers_cudnn(capability, version, lengths) else ()


def prefers_cudnn(capability: tuple[int, int], version: int, lengths: Sequence[int]) -> bool:
    """Whether cuDNN's kernels are the fastest, and trusted at these lengths.

    Args:
        capability: of the GPU.
        version: of cuDNN, 91501 for 9.15.1.
        lengths: of queries and keys.
    """
    whole_tiles = all(length % TILE == 0 for length in lengths)
    trusted = version >= (CUDNN_OF_TORCH_2_8 if whole_tiles else CUDNN_ANY_LENGTH)
    return capability[0] in CUDNN_GENERATIONS and trusted
