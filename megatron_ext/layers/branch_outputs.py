"""Multiplies or normalizes the outputs of attention and MLP before they are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_ext.layers.norms import Norm

WithBias = tuple[Tensor, Tensor | None]


def normalizes_outputs(transformer_config: TransformerConfig) -> bool:
    """Return whether the outputs of attention and MLP are normalized."""
    names = ("sandwich_norm", "reordered_norm")
    return any(getattr(transformer_config, name, False) for name in names)


def change_outputs(layer: Any) -> None:
    """Let a `TransformerLayer` multiply or normalize the outputs of its attention and MLP.

    The factor is ``residual_multiplier`` of the layer's config. Norms come before it, and are
    added only for the parts that the layer has.
    """
    config = layer.config
    factor = getattr(config, "residual_multiplier", 1.0)
    if factor != 1.0:
        layer.self_attn_bda = _multiplied(factor, layer.self_attn_bda)
        layer.mlp_bda = _multiplied(factor, layer.mlp_bda)
    if not normalizes_outputs(config):
        return
    size = config.hidden_size
    epsilon = config.layernorm_epsilon
    if not isinstance(layer.self_attention, IdentityOp):
        layer.post_self_attn_layernorm = Norm(config, size, epsilon)
        layer.self_attn_bda = _after_norm(layer.post_self_attn_layernorm, layer.self_attn_bda)
    if not isinstance(layer.mlp, IdentityOp):
        layer.post_mlp_layernorm = Norm(config, size, epsilon)
        layer.mlp_bda = _after_norm(layer.post_mlp_layernorm, layer.mlp_bda)


def _changed(add: Callable[..., Any], change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Wrap ``add``, such as `get_bias_dropout_add`, so that it gets ``change(x + bias)``."""

    def bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
        function: Callable[..., Tensor] = add(training, fused)

        def add_changed(x_with_bias: WithBias, residual: Tensor, probability: float) -> Tensor:
            x, bias = x_with_bias
            return function((change(x if bias is None else x + bias), None), residual, probability)

        return add_changed

    return bias_dropout_add


def _after_norm(norm: torch.nn.Module, add: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``add`` so that it normalizes ``x + bias`` first."""
    return _changed(add, norm)


def _multiplied(factor: float, add: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``add`` so that it multiplies ``x + bias`` first."""
    return _changed(add, lambda x: x * factor)
