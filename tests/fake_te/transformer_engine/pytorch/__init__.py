"""Modules on torch."""

from transformer_engine.pytorch import (
    attention,
    cross_entropy,
    distributed,
    fp8,
    module,
    ops,
    optimizers,
    permutation,
    router,
    tensor,
)
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.module import (
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "attention",
    "cross_entropy",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "module",
    "ops",
    "optimizers",
    "permutation",
    "router",
    "tensor",
]
