"""The pointwise parts of a transformer layer as pure functions; each becomes one compiled kernel.

In half precision, a compiled function rounds only its results, but separate kernels round every
intermediate value. So compiled results are closer to the exact values.

The norms are torch's, with support for a zero-centered gain and sequence parallelism, which
megatron-core's wrappers of torch's norms refuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.layers import compiled as compilation
from megatron_ext.layers.compiled import FusedResidual, compiled

NormSpec = tuple[str, float, bool]
"""Kind (LayerNorm or RMSNorm), epsilon, and whether the stored weight is the gain minus one."""


@dataclass(frozen=True)
class Fusions:
    """The parts of a layer that may be compiled, according to Megatron-LM's flags.

    Attributes:
        norm: False with ``--no-persist-layer-norm``, which uses torch's own kernel for the norm.
        activation: False with ``--no-bias-swiglu-fusion`` for SwiGLU, and with
            ``--no-bias-gelu-fusion`` for all other activations.
        rotary: rotary embedding and norm of queries and keys; False with ``--no-rope-fusion``.
        bias_dropout: bias-dropout-add and the norm after it; False with
            ``--no-bias-dropout-fusion``.
    """

    norm: bool = True
    activation: bool = True
    rotary: bool = True
    bias_dropout: bool = True


def fusions_of(transformer_config: TransformerConfig) -> Fusions:
    """Return the config's ``fusions``; all are allowed if it has no such attribute."""
    return getattr(transformer_config, "fusions", Fusions())


def gelu_tanh(x: Tensor) -> Tensor:
    """Apply GELU in its tanh approximation (arXiv:1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
}
NAMES = {function: name for name, function in ACTIVATIONS.items()}


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> Tensor:
    """Apply LayerNorm (arXiv:1607.06450) or RMSNorm (arXiv:1910.07467) to ``[..., h]``.

    Weight and bias are ``[h]``; LayerNorm may have a bias, RMSNorm has none. The result has the
    weight's dtype, even if ``x`` is float32.
    """
    kind, eps, zero_centered = spec
    dtype = weight.dtype
    if x.dtype != dtype:
        weight = weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
    gain = weight + 1 if zero_centered else weight
    if kind == "RMSNorm":
        y = F.rms_norm(x, gain.shape, gain, eps)
    else:
        y = F.layer_norm(x, gain.shape, gain, bias, eps)
    return y if y.dtype == dtype else y.to(dtype)


normed = compiled(norm)


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


Weights = tuple[Tensor, Tensor | None]
"""Weight and bias of a norm, ``[h]`` each; an RMSNorm has no bias."""


class _GainNorm:
    """Mixin of torch's norms; with ``zero_centered`` the stored weight is the gain minus one."""

    weight: torch.nn.Parameter

    def __init__(
        self, hidden_size: int, eps: float, *, zero_centered: bool, compiled: bool = True
    ) -> None:
        super().__init__(hidden_size, eps=eps)  # type: ignore[call-arg]
        self.zero_centered = zero_centered
        self.compiled = compiled
        if zero_centered:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor | None) -> Any:
        """Return the norm of ``x``, or the norm's `Weights` if ``x`` is None."""
        bias = getattr(self, "bias", None)
        if x is None:
            return self.weight, bias
        fuses = self.compiled and (x.is_cuda or compilation.compiler.on_cpu)
        return (normed if fuses else norm)(x, self.weight, bias, spec_of(self))


class LayerNorm(_GainNorm, torch.nn.LayerNorm):
    """LayerNorm over the last axis, ``[..., h]`` to ``[..., h]`` (Ba et al., arXiv:1607.06450)."""


class RMSNorm(_GainNorm, torch.nn.RMSNorm):
    """RMSNorm over the last axis, ``[..., h]`` to ``[..., h]`` (arXiv:1910.07467)."""


def weights_of(norm: Any) -> Weights:
    """Return a norm's weight and bias; the norm's hooks first wait until they are gathered."""
    weights: Weights = norm(None)
    return weights


def spec_of(norm: Any) -> NormSpec:
    """Return the `NormSpec` of a norm."""
    kind = "RMSNorm" if isinstance(norm, RMSNorm) else "LayerNorm"
    return kind, norm.eps, norm.zero_centered


NORMS: dict[str, Any] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


class Norm:
    """Builds `LayerNorm` or `RMSNorm` by ``config.normalization``; takes megatron-core's arguments.

    Raises:
        ConfigError: the normalization is neither LayerNorm nor RMSNorm.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> torch.nn.Module:
        if config.normalization not in NORMS:
            raise ConfigError(
                f"`--normalization` ({config.normalization}) must be LayerNorm or RMSNorm with "
                "the torch layers."
            )
        zero_centered = config.layernorm_zero_centered_gamma
        fuses = fusions_of(config).norm
        norm: torch.nn.Module = NORMS[config.normalization](
            hidden_size, eps, zero_centered=zero_centered, compiled=fuses
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
