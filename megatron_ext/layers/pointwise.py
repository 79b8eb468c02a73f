"""The pointwise parts of a transformer layer as pure functions; each becomes one compiled kernel.

In half precision, a compiled function rounds only its results, but separate kernels round every
intermediate value. So compiled results are closer to the exact values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_ext.layers.compiled import compiled
from megatron_ext.layers.fused_residual import FusedResidual
from megatron_ext.layers.norms import NormSpec, norm
from megatron_ext.layers.transformer_config import ACTIVATIONS

NAMES = {function: name for name, function in ACTIVATIONS.items()}


def _one_norm(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> tuple[Tensor]:
    return (norm(x, weight, bias, spec),)


def norm_and_statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec
) -> tuple[Tensor, ...]:
    """Return the `norm` of ``x`` ``[..., h]`` and the statistics that `norm_gradients` needs.

    The statistics are the inverse standard deviations ``[..., 1]`` (for RMSNorm, the inverse root
    mean squares) and, for LayerNorm, the means ``[..., 1]``. They are float32, or float64 if ``x``
    is float64. Weight and bias broadcast to ``x``, so each sample may have its own.
    """
    kind, eps, _ = spec
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    means: tuple[Tensor, ...] = ()
    if kind == "RMSNorm":
        variance = wide.square().mean(dim=-1, keepdim=True)
    else:
        variance, mean = torch.var_mean(wide, dim=-1, correction=0, keepdim=True)
        wide = wide - mean
        means = (mean,)
    inverse = torch.rsqrt(variance + eps)
    y = wide * inverse * _gain(weight, spec, wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    return y.to(weight.dtype), inverse, *means


def norm_gradients(
    residual_gradient: Tensor,
    plan: tuple[int, tuple[int, ...]],
    y_gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: NormSpec,
    inverse: Tensor,
    mean: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of x and, if needed, of weight and bias of a norm; see `FusedResidual`.

    ``plan`` is the number of outputs (1) and the positions of the arguments that need a gradient: 0
    for x, 1 for the weight, 2 for the bias. ``y_gradient`` is the gradient of the norm's result.
    ``inverse`` and ``mean`` are the statistics from `norm_and_statistics`.

    Let n = (x - mean) * inverse be the normalized input, and g = ``y_gradient`` * gain the gradient
    of n. The gradient of x is ``residual_gradient + inverse * (g - n mean(g n) - mean(g))``, where
    ``residual_gradient`` is the gradient of x from the residual connection; RMSNorm has no
    ``mean(g)``. The gradient of the weight is ``sum(y_gradient n)`` over the tokens that share it.
    This sum does not depend on the other sums, so a single kernel may compute all gradients.
    """
    _, indices = plan
    dtype = inverse.dtype
    normalized = (x.to(dtype) if mean is None else x.to(dtype) - mean) * inverse
    y_gradient = y_gradient.to(dtype)
    normalized_gradient = y_gradient * _gain(weight, spec, dtype)
    change = normalized_gradient - normalized * (normalized_gradient * normalized).mean(
        dim=-1, keepdim=True
    )
    if mean is not None:
        change = change - normalized_gradient.mean(dim=-1, keepdim=True)
    gradients = [(residual_gradient + inverse * change).to(x.dtype)]
    if 1 in indices:
        gradients.append((y_gradient * normalized).sum_to_size(weight.shape).to(weight.dtype))
    if 2 in indices and bias is not None:
        gradients.append(y_gradient.sum_to_size(bias.shape).to(bias.dtype))
    return tuple(gradients)


def _gain(weight: Tensor, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    """Return the gain ``[h]`` of a norm in ``dtype``; a stored weight may be the gain minus one."""
    gain = weight.to(dtype)
    return gain + 1 if spec[2] else gain


norm_with_residual = FusedResidual(
    _one_norm, saving=norm_and_statistics, gradients=norm_gradients, num_outputs=1
)
"""Takes the arguments of `norm`; returns ``x`` itself, for a residual connection, and its norm.

The backward pass adds the gradients of both in the norm's kernel.
"""


def added(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float, training: bool
) -> Tensor:
    """Return ``residual + dropout(x + bias)`` in the dtype of ``residual``, ``[s, b, h]``.

    Without ``training`` nothing is dropped.
    """
    if bias is not None:
        x = x + bias
    return residual + F.dropout(x, probability, training)


bias_dropout_add = compiled(added)


@compiled
def bias_dropout_add_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    probability: float,
    training: bool,
    weight: Tensor,
    norm_bias: Tensor | None,
    spec: NormSpec,
) -> tuple[Tensor, Tensor]:
    """Return ``residual + dropout(x + bias)``, ``[s, b, h]``, and the norm of this sum.

    Without ``training`` nothing is dropped. The last three arguments belong to the norm (`norm`).
    """
    hidden = added(x, bias, residual, probability, training)
    return hidden, norm(hidden, weight, norm_bias, spec)


@compiled
def masked_bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, drawn: Tensor, probability: float
) -> Tensor:
    """Return ``residual + dropout(x + bias)`` for given random numbers.

    ``drawn`` has one from [0, 1) for each element; elements with ``drawn < probability`` are
    dropped.
    """
    if bias is not None:
        x = x + bias
    return residual + x * (drawn >= probability) / (1 - probability)


Limits = tuple[float | None, float]
"""``(limit, offset)`` of a gated activation; see the arguments of `activated`."""
NO_LIMITS: Limits = (None, 0.0)


def limits_of(transformer_config: TransformerConfig) -> Limits:
    """Return the arguments ``limit`` and ``offset`` of `activated` for a configuration."""
    config = transformer_config
    return config.activation_func_clamp_value, config.glu_linear_offset


@compiled
def activated(
    x: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    activation: str,
    gated: bool,
    limit: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """Apply bias, activation and gate between the two matrices of an MLP.

    Return ``[s, b, f]`` or ``[tokens, f]``, where f is the width of the second matrix's input.

    Args:
        scale: factor ``[tokens, 1]`` of an expert's result; None in a dense MLP.
        activation: a key of `ACTIVATIONS`.
        gated: whether the last dimension of ``x`` is ``2 f``; if so, the activated first half is
            multiplied by the second half (arXiv:2002.05202).
        limit: greatest value of the first half and greatest magnitude of the second, which are
            clamped before the activation, as in gpt-oss; None clamps nothing.
        offset: number that is added to the second half, 1 in gpt-oss.
    """
    function: Any = ACTIVATIONS[activation]
    if bias is not None:
        x = x + bias
    if gated:
        gate, linear = x.chunk(2, dim=-1)
        if limit is not None:
            gate = gate.clamp(max=limit)
            linear = linear.clamp(-limit, limit)
        y: Tensor = function(gate) * (linear + offset if offset else linear)
    else:
        y = function(x)
    return y if scale is None else (y * scale).to(y.dtype)


@compiled
def rotary_table(
    angles: Tensor, dtype: torch.dtype, interleaved: bool, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[s, 1, 1, d / 2]`` of megatron-core's rotary angles.

    The angles ``[s, 1, 1, d]`` hold each angle twice: in both halves, or with ``interleaved`` in
    neighbouring elements. ``magnitude`` multiplies the cosines and sines in float32.
    """
    once = angles[..., ::2] if interleaved else angles.chunk(2, dim=-1)[0]
    if magnitude == 1.0:
        return once.cos().to(dtype), once.sin().to(dtype)
    return (once.cos() * magnitude).to(dtype), (once.sin() * magnitude).to(dtype)


Table = tuple[Tensor, Tensor]
_tables: Any = WeakIdKeyDictionary()
"""Cosines and sines by tensor of angles, and then by what else they depend on.

All layers and steps share them.
"""


def table_of(
    angles: Tensor,
    dtype: torch.dtype,
    *,
    interleaved: bool,
    index: int = 0,
    magnitude: float = 1.0,
) -> Table:
    """Return cosines and sines ``[s, 1, 1, d / 2]`` of angles ``[s, 1, k, d]``, from a cache.

    ``index`` says which of the k tables of angles to use, and ``magnitude`` is the factor of the
    cosines and sines. ``interleaved`` says that neighbouring channels form a pair.
    """
    tables: dict[Any, Table] = _tables.setdefault(angles, {})
    key = dtype, index, magnitude
    if key not in tables:
        # The cache is also used in training, where autograd cannot save tensors made in inference
        # mode.
        with torch.inference_mode(False), torch.no_grad():
            part = angles if angles.size(2) == 1 else angles[:, :, index : index + 1]
            tables[key] = rotary_table(part, dtype, interleaved, magnitude)
    return tables[key]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the pairs of features of ``[s, b, n, d]`` (RoFormer, arXiv:2104.09864).

    Neighbouring features form a pair if ``interleaved``; otherwise each feature of the first half
    is paired with one of the second half. Features beyond twice the width of ``cos`` stay
    unchanged.
    """
    width = 2 * cos.size(-1)
    turned = x[..., :width]
    rest = x[..., width:]
    if interleaved:
        first, second = torch.unflatten(turned, -1, (-1, 2)).unbind(-1)
    else:
        first, second = turned.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return turned if rest.size(-1) == 0 else torch.cat((turned, rest), -1)


@compiled
def queries_keys_values(
    projected: Tensor,
    bias: Tensor | None,
    groups: int,
    head_dim: int,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    q_weight: Tensor | None,
    q_bias: Tensor | None,
    k_weight: Tensor | None,
    k_bias: Tensor | None,
    spec: NormSpec | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into queries, keys and values; normalize and rotate queries and keys.

    The results are copies, so that the memory of the projection can be freed. In the backward pass,
    one kernel combines the gradients of all three into the gradient of the projection.

    Args:
        projected: ``[s, b, g * (n / g + 2) * d]``: each group's queries, its key and its value.
        bias: bias of the projection.
        groups, head_dim: number of query groups g on this rank, and head size d.
        cos, sin: cosines and sines from `rotary_table`; None applies no rotation.
        interleaved: whether neighbouring features form a pair; otherwise features i and i + d / 2
            do.
        q_weight, q_bias, k_weight, k_bias, spec: the norms of queries and keys, with the arguments
            of `norm`; there are none if ``spec`` is None.

    Returns:
        ``[s, b, n, d]``, ``[s, b, g, d]``, ``[s, b, g, d]``.
    """
    s, b, _ = projected.shape
    if bias is not None:
        projected = projected + bias
    heads = projected.view(s, b, groups, -1, head_dim)
    query = heads[..., :-2, :].flatten(2, 3)
    key = heads[..., -2, :]
    value = heads[..., -1, :]
    if spec is not None:
        assert q_weight is not None and k_weight is not None
        query = norm(query, q_weight, q_bias, spec)
        key = norm(key, k_weight, k_bias, spec)
    if cos is not None and sin is not None:
        query, key = (rotated(x, cos, sin, interleaved) for x in (query, key))
    query, key, value = (
        x.clone(memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    return query, key, value
