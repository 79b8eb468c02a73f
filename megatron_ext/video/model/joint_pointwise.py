"""The pointwise parts of double and single blocks as pure functions, which are compiled.

The modulated norm of x is ``(1 + scale) * LN(x) + shift``. Some functions also split a joint tensor
[text; image], or join the two. To do this in the compiled function that computes on both saves
copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.layers.compiled import compiled
from megatron_ext.layers.fused_residual import FusedResidual
from megatron_ext.layers.norms import NormSpec as Norm
from megatron_ext.layers.norms import norm
from megatron_ext.layers.pointwise import norm_and_statistics, norm_gradients
from megatron_ext.video.config.sizes import EPSILON
from megatron_ext.video.model.attention import rotate
from megatron_ext.video.model.linear import modulated

Pair = tuple[Tensor, Tensor]
"""Two tensors: one for the text tokens and one for the image tokens."""

_MODULATED: Norm = ("LayerNorm", EPSILON, True)
"""The settings of a modulated norm, a LayerNorm with weight scale (gain 1 + scale), bias shift."""


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor]:
    return (modulated(x, shift, scale),)


def _modulated_and_statistics(x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return norm_and_statistics(x, scale, shift, _MODULATED)


def _gradients(
    beside: Tensor, of_y: Tensor, x: Tensor, shift: Tensor, scale: Tensor, *statistics: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of x, shift and scale of a modulated norm.

    ``of_y`` is the gradient of the norm's output. ``beside``, the gradient that reaches x through
    the residual connection, is added to the gradient of x. ``statistics`` are the inverse standard
    deviation and the mean of x.
    """
    plan = 1, (0, 1, 2)
    of_x, of_scale, of_shift = norm_gradients(
        beside, plan, of_y, x, scale, shift, _MODULATED, *statistics
    )
    return of_x, of_shift, of_scale


def _modulated_gradients(
    of_x: Tensor, plan: tuple[int, tuple[int, ...]], *given: Tensor
) -> tuple[Tensor, ...]:
    gradients = _gradients(of_x, *given)
    return tuple(gradients[i] for i in plan[1])


residual_and_modulated = FusedResidual(
    _modulated, saving=_modulated_and_statistics, gradients=_modulated_gradients, num_outputs=1
)
"""Returns (x, modulated norm of x), given x ``[s, b, h]``, shift and scale ``[b, h]``.

Use the returned x in the residual connection: the norm's backward kernel adds that gradient."""


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


def _streams_and_statistics(hidden: Tensor, num_text: int, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Return the modulated norms of text and of image, and the statistics of both LayerNorms.

    The statistics are four tensors: inverse standard deviation and mean of text, then those of
    image. ``vectors`` are shift and scale of text, then of image.
    """
    txt, img = torch.split(hidden, [num_text, hidden.size(0) - num_text])
    of_txt = _modulated_and_statistics(txt, *vectors[:2])
    of_img = _modulated_and_statistics(img, *vectors[2:])
    return of_txt[0], of_img[0], *of_txt[1:], *of_img[1:]


def _streams_gradients(
    of_hidden: Tensor,
    plan: tuple[int, tuple[int, ...]],
    of_txt: Tensor,
    of_img: Tensor,
    hidden: Tensor,
    num_text: int,
    *rest: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of those arguments of `_modulated_streams` that need one.

    `FusedResidual` passes their positions in ``plan``, after the number of outputs. ``of_hidden``
    is the gradient that reaches ``hidden`` through the residual connection; ``of_txt`` and
    ``of_img`` are the gradients of the modulated norms of text and image. ``rest`` holds shift and
    scale of text, shift and scale of image, then the statistics of `_streams_and_statistics`.
    """
    sizes = [num_text, hidden.size(0) - num_text]
    (txt, img), (txt_beside, img_beside) = (torch.split(x, sizes) for x in (hidden, of_hidden))
    txt_x, *txt_vectors = _gradients(txt_beside, of_txt, txt, *rest[:2], *rest[4:6])
    img_x, *img_vectors = _gradients(img_beside, of_img, img, *rest[2:4], *rest[6:])
    gradients = [torch.cat((txt_x, img_x)), *txt_vectors, *img_vectors]
    # The argument at 1 is num_text, which has no gradient.
    return tuple(gradients[i - (i > 1)] for i in plan[1])


residual_and_modulated_streams = FusedResidual(
    _modulated_streams,
    saving=_streams_and_statistics,
    gradients=_streams_gradients,
    num_outputs=2,
)
"""Returns (hidden, modulated norm of its text, modulated norm of its image).

The arguments are hidden ``[s, b, h]`` ([text; image]), the number of text tokens, shift and scale
of text, shift and scale of image. Use the returned hidden in the residual connection, as in
`residual_and_modulated`."""


@compiled
def add_gated(
    x: Tensor, output: Tensor, other: Tensor | None, bias: Tensor, gate: Tensor
) -> Tensor:
    """Return ``x + gate * (output + other + bias)`` for x ``[s, b, h]`` and gate ``[b, h]``.

    If ``other`` is None, it is left out of the sum.
    """
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
    return (txt + txt_gate * (txt_output + txt_bias), img + img_gate * (img_output + img_bias))


@compiled
def add_streams(hidden: Tensor, *added: Tensor) -> Tensor:
    """Return ``x + gate * (output + bias)`` of text and of image, as one joint tensor.

    ``hidden`` is the joint tensor x; ``added`` holds two outputs, two biases and two gates, text
    first.
    """
    return torch.cat(_added(hidden, *added))


@compiled
def add_and_modulate_streams(hidden: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the joint tensor of `add_streams`, then the modulated norms of its text and its image.

    ``parts`` are the arguments of `add_streams` after the first, then shift and scale of text, then
    shift and scale of image.
    """
    *added, txt_shift, txt_scale, img_shift, img_scale = parts
    txt, img = _added(hidden, *added)
    normed = modulated(txt, txt_shift, txt_scale), modulated(img, img_shift, img_scale)
    return torch.cat((txt, img)), *normed


def _split(
    qkv: Tensor, bias: Tensor | None, q_weight: Tensor, k_weight: Tensor, spec: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normed queries, normed keys and values from a projection ``[s, b, n * 3 * d]``.

    ``bias``, unless it is None, is added to ``qkv`` first. ``q_weight``, ``k_weight`` ``[d]`` and
    ``spec`` are the weights and the common settings (`NormSpec`) of the norms.
    """
    if bias is not None:
        qkv = qkv + bias
    d = q_weight.size(0)
    # No -1: a rank may hold no text, and nothing tells the sizes of an empty view.
    heads = qkv.view(*qkv.shape[:-1], qkv.size(-1) // (3 * d), 3, d)
    query, key, value = heads.unbind(-2)
    query = norm(query, q_weight, None, spec)
    key = norm(key, k_weight, None, spec)
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
    """Return queries and keys, normed and rotated, and values, ``[s, b, n, d]`` each.

    Args:
        qkv: output of the projection before its ``bias`` is added, ``[s, b, n * 3 * d]``: for each
            head its query, key and value.
        q_weight, k_weight: weights of the norms, ``[d]``.
        cos, sin: cosines and sines of the rotary angles, ``[s, b, 1, d / 2]``.
        spec: settings of the norms, a `NormSpec`.
    """
    query, key, value = _split(qkv, bias, q_weight, k_weight, spec)
    # A compiled function may return no view of its argument.
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
    """Return queries, keys and values of [text; image], ``[s, b, n, d]`` each.

    Queries and keys are normed and rotated. Text and image have projections, biases and norms of
    their own; the arguments are otherwise those of `heads`.
    """
    txt = _split(txt_qkv, txt_bias, txt_q_weight, txt_k_weight, spec)
    img = _split(img_qkv, img_bias, img_q_weight, img_k_weight, spec)
    query, key, value = (torch.cat(pair) for pair in zip(txt, img, strict=True))
    return rotate(query, (cos, sin)), rotate(key, (cos, sin)), value
