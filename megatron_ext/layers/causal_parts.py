"""Causal attention of the last positions of a sequence to all keys, in two parts on cuDNN.

Under context parallelism, a slice of queries attends to all earlier keys and, causally, to its own
keys. cuDNN's causal mask cannot express this. So there are two calls, each for a part of the keys:
the earlier keys, and the slice's own keys. Their outputs are merged by the log-sum-exp of their
scores. FlashAttention supports this mask in a single call, but FlashAttention 2 is slower than two
calls of cuDNN on the GPUs for which `sdpa.prefers_cudnn` returns True.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend

from megatron_ext.layers.compiled import compiled
from megatron_ext.layers.sdpa import kernels_for

Saved = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class PartKernel:
    """An attention kernel whose results for different parts of the keys can be merged.

    Attributes:
        forward: takes query, key, value, causal and scale; returns the output ``[b, n, q, d]``, the
            log-sum-exp of the scores, ``[b, n, q]`` or ``[b, n, q, 1]``, and a state.
        backward: takes the output's gradient, query, key, value, output, log-sum-exp, that state,
            causal and scale; returns the gradients of query, key and value. It must accept key and
            value of one part together with the merged output and log-sum-exp of all parts.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Saved]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _cudnn_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Saved]:
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse, (seed, offset)


def _cudnn_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: Saved,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        gradient, query, key, value, out, lse, *saved, None, None, None,
        query.size(2), key.size(2), 0.0, causal, scale=scale,
    )  # fmt: skip
    return gradients


CUDNN = PartKernel(_cudnn_forward, _cudnn_backward)


def prefers_parts(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, backend: AttnBackend
) -> bool:
    """Return whether to use `attend_in_parts`: whether cuDNN is the first choice and supports it.

    The queries ``[b, n, q, d]`` are at the last q positions of the keys ``[b, g, k, d]``; attention
    is causal. Flash kernels need no parts. At some lengths cuDNN's gradients with a mask may be NaN
    (see `sdpa`); parts are not used there either, because a part's backward pass gets the output
    and log-sum-exp over all keys, just as with a mask.

    Raises:
        ConfigError: ``backend`` allows only cuDNN, but its gradients may be NaN at these lengths.
    """
    kernels = kernels_for(query, key, backend, masked=True)
    if dropout > 0 or not kernels or kernels[0] != SDPBackend.CUDNN_ATTENTION:
        return False
    grouped = query.size(1) != key.size(1)
    return all(
        can_use_cudnn_attention(SDPAParams(query, k, v, None, 0.0, causal, grouped))
        for (k, v), causal in zip(_parts(query, key, value), (False, True), strict=True)
    )


def attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: PartKernel = CUDNN
) -> Tensor:
    """Return causal attention ``[b, n, q, d]``, where the queries are the last q of k positions.

    One call of ``kernel`` attends to the keys before the first query, another one attends causally
    to the last q keys; the two results are merged.

    Args:
        query: ``[b, n, q, d]`` with q < k.
        key, value: ``[b, g, k, d]`` with g query groups.
    """
    out: Tensor = _InParts.apply(query, key, value, scale, kernel)  # type: ignore[no-untyped-call]
    return out


def _parts(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, ...]]:
    """Return two pairs of key and value: those before the first query, and the others."""
    first = key.size(2) - query.size(2)
    return [(key[:, :, :first], value[:, :, :first]), (key[:, :, first:], value[:, :, first:])]


@compiled
def merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention outputs ``[b, n, q, d]`` and log-sum-exps over two parts of the keys."""
    share = torch.sigmoid(other_lse - lse).reshape(*out.shape[:3], 1)
    mixed = torch.lerp(out.to(lse.dtype), other.to(lse.dtype), share)
    return mixed.to(out.dtype), torch.logaddexp(lse, other_lse)


class _InParts(torch.autograd.Function):
    """Attention over two parts of the keys.

    The gradient of each part follows from the output and log-sum-exp over all keys, as in ring
    attention (arXiv:2310.01889): a part's probabilities are exp(score - log-sum-exp).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: PartKernel
    ) -> Tensor:
        earlier, own = _parts(query, key, value)
        out, lse, saved = kernel.forward(query, *earlier, False, scale)
        own_out, own_lse, own_saved = kernel.forward(query, *own, True, scale)
        out, lse = merged(out, lse, own_out, own_lse)
        ctx.save_for_backward(query, key, value, out, lse, *saved, *own_saved)
        ctx.kernel = kernel
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, out, lse, *saved = ctx.saved_tensors
        half = len(saved) // 2
        kept = tuple(saved[:half]), tuple(saved[half:])
        earlier, own = (
            ctx.kernel.backward(gradient, query, *part, out, lse, its, causal, ctx.scale)
            for part, its, causal in zip(
                _parts(query, key, value), kept, (False, True), strict=True
            )
        )
        key_gradient, value_gradient = (torch.cat([earlier[i], own[i]], dim=2) for i in (1, 2))
        return earlier[0] + own[0], key_gradient, value_gradient, None, None
