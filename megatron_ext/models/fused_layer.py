"""The pointwise parts of a transformer layer, fused across its submodules.

megatron-core's layer adds a branch to the residual stream in one kernel and norms the sum in
another, and autograd adds the gradients of norm and residual connection in a third. Here the sum
and its norm are one, and so are the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import (
    get_bias_dropout_add as core_bias_dropout_add,
)
from torch import Tensor

from megatron_ext.models.compiled import compiles
from megatron_ext.models.norm import LayerNorm, RMSNorm, spec_of, weights_of
from megatron_ext.models.pointwise import (
    added,
    bias_dropout_add,
    bias_dropout_add_norm,
    fusions_of,
    norm_beside,
)

WithBias = tuple[Tensor, Tensor | None]


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """megatron-core's function of the same name, with `bias_dropout_add` where it compiles.

    A residual stream in float32 stays so, where core rounds it to the 16 bits of ``x``.

    Args:
        training: drop elements.
        fused: ``--no-bias-dropout-fusion`` does without.
    """
    unfused: Callable[..., Tensor] = core_bias_dropout_add(training, fused=False)

    def function(x_with_bias: WithBias, residual: Tensor, probability: float) -> Tensor:
        x, bias = x_with_bias
        if residual.dtype != x.dtype and not (fused and compiles(x)):
            return added(x, bias, residual, probability, training)
        if not (fused and compiles(x)):
            return unfused(x_with_bias, residual, probability)
        return bias_dropout_add(x, bias, residual, probability, training)

    return function


class FusedForward:
    """Mixin over megatron-core's TransformerLayer; see the module."""

    config: Any
    training: bool
    hidden_dropout: float
    input_layernorm: Any
    self_attention: Any
    self_attn_bda: Any
    pre_mlp_layernorm: Any
    mlp: Any
    recompute_input_layernorm: bool
    recompute_pre_mlp_layernorm: bool
    recompute_mlp: bool
    offload_attn_norm: bool
    offload_mlp_norm: bool
    _forward_post_mlp: Any

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """megatron-core's forward pass, or the same of fused parts.

        Args:
            hidden_states: ``[s, b, h]``.
            args: as megatron-core's.
            kwargs: as megatron-core's.
        """
        if args or not self._fuses(hidden_states, kwargs):
            given: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[misc]
                hidden_states, *args, **kwargs
            )
            return given
        residual, normed = self._beside(self.input_layernorm, hidden_states)
        attended = self.self_attention(
            normed,
            kwargs.get("attention_mask"),
            rotary_pos_emb=kwargs.get("rotary_pos_emb"),
        )
        hidden, normed = self._added(attended, residual, self.pre_mlp_layernorm)
        mlp = functools.partial(self.mlp, padding_mask=kwargs.get("padding_mask"))
        if self.recompute_mlp:
            output = tensor_parallel.checkpoint(mlp, False, normed)
        else:
            output = mlp(normed)
        return self._forward_post_mlp(output, hidden), kwargs.get("context")

    def _fuses(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether nothing is asked for that only megatron-core's forward pass does."""
        known = ("attention_mask", "rotary_pos_emb", "padding_mask", "context_mask")
        asked = any(value is not None for name, value in kwargs.items() if name not in known)
        return (
            fusions_of(self.config).bias_dropout
            and not asked
            and isinstance(self.input_layernorm, (LayerNorm, RMSNorm))
            and not (self.recompute_input_layernorm or self.recompute_pre_mlp_layernorm)
            and not (self.offload_attn_norm or self.offload_mlp_norm)
            and compiles(x)
        )

    def _beside(self, norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` and its norm."""
        if not norm.compiled:
            return x, norm(x)
        residual, normed = norm_beside(x, *weights_of(norm), spec_of(norm))
        return residual, normed

    def _added(self, output: WithBias, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """The residual stream after a branch, and its norm."""
        training = bool(self.training)
        bda = self.self_attn_bda
        if bda is not get_bias_dropout_add or not norm.compiled:
            hidden = bda(training, True)(output, residual, self.hidden_dropout)
            return hidden, norm(hidden)
        x, bias = output
        weights = weights_of(norm)
        return bias_dropout_add_norm(
            x, bias, residual, self.hidden_dropout, training, *weights, spec_of(norm)
        )
