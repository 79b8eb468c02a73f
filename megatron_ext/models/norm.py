"""Torch norms that work under sequence parallelism and with a zero-centred gain.

megatron-core's wrapped torch norms refuse both; these mark their parameters instead, so that
core sums their gradients over the tensor-parallel ranks that each saw a part of the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.models import pointwise

Weights = tuple[Tensor, Tensor | None]
"""Weight and bias of a norm, ``[h]`` each; an RMSNorm has no bias."""


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm over the last axis, ``[..., h]`` to ``[..., h]`` (Ba et al., arXiv:1607.06450).

    With ``zero_centered`` the stored weight is the gain minus one (``--apply-layernorm-1p``).
    """

    def __init__(
        self, hidden_size: int, eps: float, *, zero_centered: bool, compiled: bool = True
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = zero_centered
        self.compiled = compiled
        _finish(self, zero_centered)

    def forward(self, input: Tensor | None) -> Any:
        """The norm of ``input``, or, given None, `Weights`."""
        if input is None:
            return self.weight, self.bias
        function = pointwise.normed if self.compiled else pointwise.norm
        return function(input, self.weight, self.bias, spec_of(self))


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last axis, ``[..., h]`` to ``[..., h]`` (arXiv:1910.07467)."""

    def __init__(
        self, hidden_size: int, eps: float, *, zero_centered: bool, compiled: bool = True
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = zero_centered
        self.compiled = compiled
        _finish(self, zero_centered)

    def forward(self, x: Tensor | None) -> Any:
        """The norm of ``x``, or, given None, `Weights`."""
        if x is None:
            return self.weight, None
        function = pointwise.normed if self.compiled else pointwise.norm
        return function(x, self.weight, None, spec_of(self))


def _finish(norm: torch.nn.Module, zero_centered: bool) -> None:
    if zero_centered:
        torch.nn.init.zeros_(norm.weight)  # type: ignore[arg-type]


def weights_of(norm: LayerNorm | RMSNorm) -> Weights:
    """Weight and bias, for functions that norm by themselves.

    By a call of the module, for whose sake data parallelism waits until it has gathered them.
    """
    weights: Weights = norm(None)
    return weights


def spec_of(norm: LayerNorm | RMSNorm) -> pointwise.Norm:
    """What `pointwise` is to know of a norm."""
    kind = "RMSNorm" if isinstance(norm, RMSNorm) else "LayerNorm"
    assert norm.eps is not None
    return kind, norm.eps, norm.zero_centered


NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


class Norm:
    """Builds the norm that a TransformerConfig names; takes megatron-core's arguments.

    Raises:
        ConfigError: a normalization other than LayerNorm and RMSNorm.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> torch.nn.Module:
        if config.normalization not in NORMS:
            raise ConfigError(
                f"`--normalization` ({config.normalization}) must be LayerNorm or RMSNorm with "
                "the torch layers."
            )
        norm = NORMS[config.normalization](
            hidden_size,
            eps,
            zero_centered=config.layernorm_zero_centered_gamma,
            compiled=pointwise.fusions_of(config).norm,
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
