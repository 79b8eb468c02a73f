"""Modules on torch."""

# ruff: noqa: F401

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
