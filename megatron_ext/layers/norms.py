"""torch's norms, with a zero-centered gain and sequence parallelism.

megatron-core's wrappers of torch's norms refuse both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.layers import compiled as compilation
from megatron_ext.layers.compiled import compiled, fusions_of

NormSpec = tuple[str, float, bool]
"""Kind (LayerNorm or RMSNorm), epsilon, and whether the stored weight is the gain minus one."""


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


Weights = tuple[Tensor, Tensor | None]
"""Weight and bias of a norm, ``[h]`` each; an RMSNorm has no bias."""


class _GainNorm:
    """Mixin of torch's norms; with ``zero_centered`` the stored weight is the gain minus one."""

    weight: torch.nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        zero_centered: bool,
        compiled: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, eps=eps, **options)  # type: ignore[call-arg]
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
        if not getattr(config, "norm_elementwise_affine", True):
            from megatron_ext.layers.weightless_norm import WeightlessNorm

            return WeightlessNorm(config, hidden_size, eps)
        zero_centered = config.layernorm_zero_centered_gamma
        fuses = fusions_of(config).norm
        has_bias = config.normalization == "RMSNorm" or getattr(config, "norm_bias", True)
        options = {} if has_bias else {"bias": False}
        norm: torch.nn.Module = NORMS[config.normalization](
            hidden_size, eps, zero_centered=zero_centered, compiled=fuses, **options
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
