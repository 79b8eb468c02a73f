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

gated = compiled(add_gated)


@compiled
def gated_and_normed(
    x: Tensor, output: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, spec: Norm
) -> tuple[Tensor, Tensor]:
    """`add_gated`, and the `norm` of what it gives."""
    hidden = add_gated(x, output, gate)
    return hidden, norm(hidden, weight, bias, spec)


@compiled
def added_and_modulated(
    x: Tensor, output: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """``x + output``, and its `modulated_frames`."""
    hidden = x + output
    return hidden, modulated_frames(hidden, shift, scale)


@compiled
def squares_of_heads(qkv: Tensor, head_dim: int) -> Tensor:
    """Sums of squares of this rank's queries and keys, ``[2, s, b]``, of ``[s, b, n * 3 * d]``."""
    heads = torch.unflatten(qkv, -1, (-1, 3, head_dim))
    return torch.stack([squares(x) for x in heads.unbind(-2)[:2]])


@compiled
def heads(
    qkv: Tensor,
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
    query, key, value = torch.unflatten(qkv, -1, (-1, 3, head_dim)).unbind(-2)
    of_query, of_key = (squares(query), squares(key)) if total is None else total.unbind(0)
    query, key = (
        scaled(x, sums, weight, width, eps)
        for x, sums, weight in ((query, of_query, q_weight), (key, of_key, k_weight))
    )
    q, k, v = (frames_first(x, num_parts, num_frames) for x in (query, key, value))
    copied = v.clone(memory_format=torch.contiguous_format)
    return rotate(q, (cos, sin)), rotate(k, (cos, sin)), copied
