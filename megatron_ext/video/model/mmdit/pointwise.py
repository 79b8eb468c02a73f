"""The pointwise parts of the MMDiT's blocks as pure functions, each one graph where it compiles.

See `layers.compiled` and `layers.compiled`. Text and image go through one function together where
they are cut from, or join, one tensor, so that neither is copied for it.

Rotary positions over three axes: latent frame, row and column (RoFormer, arXiv:2104.09864).

Pair layout: adjacent features (2j, 2j + 1) of a head form the pair that frequency j rotates, as in
FLUX. Weights of implementations that rotate the pairs (j, d / 2 + j) fit after a permutation of
the output channels of the query and key projections, of head feature d / 2 + j to 2j + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.layers.compiled import FusedResidual, compiled
from megatron_ext.layers.pointwise import NormSpec as Norm
from megatron_ext.layers.pointwise import norm
from megatron_ext.video.model.modulation import modulated


def rotary_table(
    ids: Tensor, axes_dim: Sequence[int], head_dim: int, theta: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines by which `rotate` turns queries and keys, in float32.

    The angle of pair j of axis i is ``ids[..., i] * theta ** (-2j / axes_dim[i])``; the axes follow
    one another. Text tokens have ids 0, which turn nothing.

    Args:
        ids: positions, ``[b, s, 3]``.
        axes_dim: features for each axis, even.
        head_dim: d.
        theta: base of the frequencies.

    Returns:
        Two tensors ``[s, b, 1, d / 2]``.

    Raises:
        ConfigError: axes whose widths do not sum to ``head_dim``.
    """
    if sum(axes_dim) != head_dim or len(axes_dim) != ids.size(-1):
        raise ConfigError(
            f"`axes_dim` {tuple(axes_dim)} must be {ids.size(-1)} widths whose sum is the size of "
            f"a head ({head_dim})."
        )
    angles = []
    for axis, width in enumerate(axes_dim):
        exponents = torch.arange(0, width, 2, device=ids.device, dtype=torch.float32) / width
        angles.append(ids[..., axis].float().unsqueeze(-1) * theta**-exponents)
    angle = torch.cat(angles, dim=-1).transpose(0, 1).unsqueeze(2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs of queries or keys in float32.

    Args:
        x: ``[s, b, n, d]``.
        table: see `rotary_table`.

    Returns:
        ``[s, b, n, d]`` in the dtype of ``x``.
    """
    cos, sin = table
    first, second = x.float().view(*x.shape[:-1], x.size(-1) // 2, 2).unbind(-1)
    turned = torch.stack((cos * first - sin * second, sin * first + cos * second), dim=-1)
    return turned.flatten(-2).to(x.dtype)


Pair = tuple[Tensor, Tensor]
"""Of text and image."""


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor]:
    return (modulated(x, shift, scale),)


modulated_beside = FusedResidual(_modulated)
"""``[s, b, h]`` and it `modulated`."""


def _modulated_streams(
    hidden: Tensor,
    num_text: int,
    txt_shift: Tensor,
    txt_scale: Tensor,
    img_shift: Tensor,
    img_scale: Tensor,
) -> Pair:
    txt, img = torch.split(hidden, [num_text, hidden.size(0) - num_text])
    return modulated(txt, txt_shift, txt_scale), modulated(img, img_shift, img_scale)


modulated_streams_beside = FusedResidual(_modulated_streams)
"""``[s, b, h]``, its text `modulated`, and its image."""


@compiled
def add_gated(
    x: Tensor, output: Tensor, other: Tensor | None, bias: Tensor, gate: Tensor
) -> Tensor:
    """``x + gate * (output + other + bias)``: ``[s, b, h]``, gate ``[b, h]``, bias ``[h]``."""
    total = output if other is None else output + other
    return x + gate * (total + bias)


def _added(
    hidden: Tensor,
    txt_output: Tensor,
    img_output: Tensor,
    txt_bias: Tensor,
    img_bias: Tensor,
    txt_gate: Tensor,
    img_gate: Tensor,
) -> Pair:
    txt, img = torch.split(hidden, [txt_output.size(0), img_output.size(0)])
    return (
        txt + txt_gate * (txt_output + txt_bias),
        img + img_gate * (img_output + img_bias),
    )


@compiled
def add_streams(
    hidden: Tensor,
    txt_output: Tensor,
    img_output: Tensor,
    txt_bias: Tensor,
    img_bias: Tensor,
    txt_gate: Tensor,
    img_gate: Tensor,
) -> Tensor:
    """``[s, b, h]`` and what each stream adds to its part of it, through its gate."""
    return torch.cat(_added(hidden, txt_output, img_output, txt_bias, img_bias, txt_gate, img_gate))


@compiled
def add_and_modulate_streams(
    hidden: Tensor,
    txt_output: Tensor,
    img_output: Tensor,
    txt_bias: Tensor,
    img_bias: Tensor,
    txt_gate: Tensor,
    img_gate: Tensor,
    txt_shift: Tensor,
    txt_scale: Tensor,
    img_shift: Tensor,
    img_scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_streams`, and what it gives modulated, text and image."""
    txt, img = _added(hidden, txt_output, img_output, txt_bias, img_bias, txt_gate, img_gate)
    normed = modulated(txt, txt_shift, txt_scale), modulated(img, img_shift, img_scale)
    return torch.cat((txt, img)), *normed


def _split(
    qkv: Tensor, bias: Tensor | None, q_weight: Tensor, k_weight: Tensor, spec: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, normed, key, normed, and value of ``[s, b, n * 3 * d]``, each ``[s, b, n, d]``."""
    if bias is not None:
        qkv = qkv + bias
    d = q_weight.size(0)
    # No -1: a rank may hold no text, and nothing tells the sizes of an empty view.
    heads = qkv.view(*qkv.shape[:-1], qkv.size(-1) // (3 * d), 3, d)
    query, key, value = heads.unbind(-2)
    query, key = norm(query, q_weight, None, spec), norm(key, k_weight, None, spec)
    return query.to(value.dtype), key.to(value.dtype), value


@compiled
def heads(
    qkv: Tensor,
    bias: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    spec: Norm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed and rotated, and values of one projection.

    Args:
        qkv: ``[s, b, n * 3 * d]``, for each head its query, key and value.
        bias: of the projection, to be added here.
        q_weight, k_weight: of the norms, ``[d]``.
        cos, sin: see `rope.rotary_table`.
        spec: of the norms.

    Returns:
        Three tensors ``[s, b, n, d]``; the values are copied, see `queries_keys_values`.
    """
    query, key, value = _split(qkv, bias, q_weight, k_weight, spec)
    copied = value.clone(memory_format=torch.contiguous_format)
    return rotate(query, (cos, sin)), rotate(key, (cos, sin)), copied


@compiled
def joint_heads(
    img_qkv: Tensor,
    img_bias: Tensor | None,
    txt_qkv: Tensor,
    txt_bias: Tensor | None,
    img_q_weight: Tensor,
    img_k_weight: Tensor,
    txt_q_weight: Tensor,
    txt_k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    spec: Norm,
) -> tuple[Tensor, Tensor, Tensor]:
    """`heads` of text and image, which each have weights of their own, as one sequence."""
    txt = _split(txt_qkv, txt_bias, txt_q_weight, txt_k_weight, spec)
    img = _split(img_qkv, img_bias, img_q_weight, img_k_weight, spec)
    query, key, value = (torch.cat(pair) for pair in zip(txt, img, strict=True))
    return rotate(query, (cos, sin)), rotate(key, (cos, sin)), value
