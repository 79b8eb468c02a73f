"""The pointwise parts of a video DiT's block as pure functions, each one graph where it compiles.

See `models.compiled` and `models.beside`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.models.beside import Beside
from megatron_ext.models.causal_video.modulation import add_gated, modulated_frames
from megatron_ext.models.causal_video.norm import scaled, squares
from megatron_ext.models.causal_video.rope import rotate
from megatron_ext.models.causal_video.tokens import frames_first
from megatron_ext.models.compiled import compiled
from megatron_ext.models.pointwise import Norm, norm


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor]:
    return (modulated_frames(x, shift, scale),)


modulated_beside = Beside(_modulated)
"""``[s, b, h]`` and its `modulated_frames`."""


@compiled
def gated(x: Tensor, output: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """`add_gated` of ``output + bias``."""
    return add_gated(x, output + bias, gate)


@compiled
def gated_and_normed(
    x: Tensor,
    output: Tensor,
    bias: Tensor,
    gate: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    spec: Norm,
) -> tuple[Tensor, Tensor]:
    """`gated`, and the `norm` of what it gives."""
    hidden = add_gated(x, output + bias, gate)
    return hidden, norm(hidden, weight, norm_bias, spec)


@compiled
def added_and_modulated(
    x: Tensor, output: Tensor, bias: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """``x + output + bias``, and its `modulated_frames`."""
    hidden = x + (output + bias)
    return hidden, modulated_frames(hidden, shift, scale)


@compiled
def squares_of_heads(qkv: Tensor, bias: Tensor, head_dim: int) -> Tensor:
    """Sums of squares of this rank's queries and keys, ``[2, s, b]``.

    Args:
        qkv: ``[s, b, n * 3 * d]``.
        bias: to be added to it.
        head_dim: d.
    """
    heads = torch.unflatten(qkv + bias, -1, (-1, 3, head_dim))
    return torch.stack([squares(x) for x in heads.unbind(-2)[:2]])


@compiled
def heads(
    qkv: Tensor,
    bias: Tensor,
    total: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: tuple[int, int, float],
    num_parts: int,
    num_frames: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed and rotated, and values of one projection, frame after frame.

    Args:
        qkv: ``[parts * t * m, b, n * 3 * d]``, for each head its query, key and value.
        bias: of the projection, to be added here.
        total: sums of squares over all ranks, see `squares_of_heads`; None: this one has all.
        q_weight, k_weight: of the norms, this rank's ``[n * d]``.
        cos, sin: see `rope.rotary_table`.
        sizes: d, the width of all ranks' heads, and epsilon.
        num_parts: tensor-parallel ranks that share out the sequence.
        num_frames: t.

    Returns:
        Three tensors ``[t, parts * m, b, n, d]``; the values are copied, see
        `queries_keys_values`.
    """
    head_dim, width, eps = sizes
    query, key, value = torch.unflatten(qkv + bias, -1, (-1, 3, head_dim)).unbind(-2)
    of_query, of_key = (squares(query), squares(key)) if total is None else total.unbind(0)
    query, key = (
        scaled(x, sums, weight, width, eps)
        for x, sums, weight in ((query, of_query, q_weight), (key, of_key, k_weight))
    )
    q, k, v = (frames_first(x, num_parts, num_frames) for x in (query, key, value))
    copied = v.clone(memory_format=torch.contiguous_format)
    return rotate(q, (cos, sin)), rotate(k, (cos, sin)), copied
