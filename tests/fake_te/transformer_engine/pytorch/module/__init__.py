"""Linear layers and norms."""

# ruff: noqa: F401

from transformer_engine.pytorch.module import base
from transformer_engine.pytorch.module.linear import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.module.norm import LayerNorm, RMSNorm
from transformer_engine.pytorch.module.padding import Fp8Padding, Fp8Unpadding
