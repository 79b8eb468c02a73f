"""Every compiled function of the engine, with arguments of a real size and the limits it keeps.

Text has the widths of Llama 3.2 3B at 8192 tokens. A case's limits are the numbers of its kernels,
forward and backward, and the traffic of these in units of its first argument, which is usually one
hidden state. A function that needs more than before fails; one that needs less gets a new number.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import megatron_ext
from megatron_ext.layers import (
    attention_variants,
    causal_parts,
    latent_attention,
    norms,
    pointwise,
)
from megatron_ext.layers.fp8 import casting
from megatron_ext.losses import softmax_kernels

PACKAGE = Path(megatron_ext.__file__).parent
S, H, FFN, HEADS, GROUPS, D = 8192, 3072, 8192, 24, 8, 128
ROTATED = 64
"""Channels of a head that multi-latent attention rotates, beside D others."""
VOCABULARY, BLOCK = 128_256, 4096
RMS = ("RMSNorm", 1e-5, False)
LAYER = ("LayerNorm", 1e-5, False)
NO_NORM = (None, None, None, None, None)
"""Arguments of `queries_keys_values` without norms."""
SINES_STACK = 32
"""Bytes of stack that sines and cosines of large arguments take."""


@dataclass(frozen=True)
class Case:
    """A call of a compiled function, and what it may cost.

    Attributes:
        name: id of the test.
        function: the compiled function.
        arguments: makes the arguments, fake tensors among them.
        kernels: largest numbers of kernels, forward and backward.
        passes: largest traffic forward and backward, in units of the first argument.
        stack: bytes of a thread's stack that its kernels may use.
    """

    name: str
    function: Any
    arguments: Callable[[], tuple[Any, ...]]
    kernels: tuple[int, int]
    passes: tuple[float, float]
    stack: int = 0


def modules_with(pattern: str) -> list[ModuleType]:
    """Return the modules of the package whose text matches a pattern, imported."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if re.search(pattern, path.read_text(encoding="utf-8")):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            found.append(importlib.import_module(name))
    return found


def half(*shape: int, grad: bool = True) -> Tensor:
    """Return a bfloat16 tensor that wants a gradient."""
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda", requires_grad=grad)


def single(*shape: int) -> Tensor:
    """Return a float32 tensor."""
    return torch.empty(shape, dtype=torch.float32, device="cuda")


def ids(*shape: int) -> Tensor:
    """Return integers."""
    return torch.zeros(*shape, dtype=torch.int64, device="cuda")


def hidden() -> Tensor:
    """Return hidden states ``[s, b, h]``."""
    return half(S, 1, H)


def table() -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary positions."""
    return half(S, 1, 1, D // 2, grad=False), half(S, 1, 1, D // 2, grad=False)


def projected() -> Tensor:
    """Return what the projection to queries, keys and values gives."""
    return half(S, 1, (HEADS + 2 * GROUPS) * D)


def matrix() -> Tensor:
    """Return a matrix that is quantized."""
    return half(S, FFN, grad=False)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

TEXT = (
    Case("norm", norms.normed, lambda: (hidden(), half(H), None, RMS), (1, 2), (2, 3.03)),
    Case(
        "layer_norm",
        norms.normed,
        lambda: (hidden(), half(H), half(H), LAYER),
        (1, 2),
        (2, 3.06),
    ),
    Case(
        "norm_with_residual",
        pointwise.norm_with_residual,
        lambda: (hidden(), half(H), None, RMS),
        (1, 2),
        (2, 4.03),
    ),
    Case(
        "dropout",
        pointwise.bias_dropout_add,
        lambda: (hidden(), half(H), hidden(), 0.1, True),
        (1, 3),
        (3.5, 3.53),
    ),
    Case(
        "residual",
        pointwise.bias_dropout_add,
        lambda: (hidden(), None, hidden(), 0.0, True),
        (1, 0),
        (3, 0),
    ),
    Case(
        "residual_norm",
        pointwise.bias_dropout_add_norm,
        lambda: (hidden(), None, hidden(), 0.0, True, half(H), None, RMS),
        (1, 2),
        (4, 4.03),
    ),
    Case(
        "masked_dropout",
        pointwise.masked_bias_dropout_add,
        lambda: (hidden(), half(H), hidden(), single(S, 1, H), 0.1),
        (1, 3),
        (5.5, 3.53),
    ),
    Case(
        "swiglu",
        pointwise.activated,
        lambda: (half(S, 1, 2 * FFN), None, None, "silu", True),
        (1, 1),
        (1.5, 2.5),
    ),
    Case(
        "gelu",
        pointwise.activated,
        lambda: (half(S, 1, FFN), half(FFN), None, "gelu", False),
        (1, 3),
        (2, 4.01),
    ),
    Case(
        "gelu_glu",
        pointwise.activated,
        lambda: (half(S, 1, 2 * FFN), None, None, "gelu_tanh", True),
        (1, 1),
        (1.5, 2.5),
    ),
    Case(
        "clamped_glu",
        pointwise.activated,
        lambda: (half(S, 2 * FFN), half(2 * FFN), half(S, 1), "quick_gelu", True, 7.0, 1.0),
        (1, 2),
        (1.5, 3.51),
    ),
    Case(
        "expert_swiglu",
        pointwise.activated,
        lambda: (half(S, 2 * FFN), None, half(S, 1), "silu", True),
        (1, 2),
        (1.5, 4),
    ),
    Case(
        "rotary_table",
        pointwise.rotary_table,
        lambda: (single(S, 1, 1, D), torch.bfloat16, False),
        (1, 0),
        (1.5, 0),
        SINES_STACK,
    ),
    Case(
        "scaled_rotary_table",
        pointwise.rotary_table,
        lambda: (single(S, 1, 1, D), torch.bfloat16, False, 1.2),
        (1, 0),
        (1.5, 0),
        SINES_STACK,
    ),
    Case(
        "heads",
        pointwise.queries_keys_values,
        lambda: (projected(), None, GROUPS, D, *table(), False, *NO_NORM),
        (3, 1),
        (3.05, 2.02),
    ),
    Case(
        "normed_heads",
        pointwise.queries_keys_values,
        lambda: (projected(), None, GROUPS, D, *table(), False, half(D), None, half(D), None, RMS),
        (3, 6),
        (3.26, 9.92),
    ),
    Case(
        "latent_heads",
        latent_attention.latent_heads,
        lambda: (
            half(S, 1, HEADS * (D + ROTATED)),
            half(S, 1, HEADS * 2 * D),
            half(S, 1, ROTATED),
            *(half(S, 1, 1, ROTATED // 2, grad=False) for _ in "cs"),
            HEADS,
            D,
        ),
        (2, 4),
        (5.7, 5.41),
    ),
    Case(
        "gates",
        attention_variants.compiled_times_gate,
        lambda: (half(S, 1, HEADS * D), half(S, 1, HEADS, D)),
        (1, 1),
        (3, 5),
    ),
    Case(
        "parts_of_attention",
        causal_parts.merged,
        lambda: (
            half(1, HEADS, S // 4, D, grad=False),
            single(1, HEADS, S // 4, 1),
            half(1, HEADS, S // 4, D, grad=False),
            single(1, HEADS, S // 4, 1),
        ),
        (2, 0),
        (3.08, 0),
    ),
    Case(
        "statistics",
        softmax_kernels.statistics,
        lambda: (half(BLOCK, VOCABULARY, grad=False), ids(BLOCK, 1), False),
        (3, 0),
        (1, 0),
    ),
    Case(
        "to_gradient",
        softmax_kernels.to_gradient_,
        lambda: (
            half(BLOCK, VOCABULARY, grad=False),
            ids(BLOCK, 1),
            *(single(BLOCK, 1) for _ in range(4)),
        ),
        (1, 0),
        (2, 0),
    ),
    Case(
        "capped_logits",
        softmax_kernels.limit_,
        lambda: (half(BLOCK, VOCABULARY, grad=False), 30.0),
        (1, 0),
        (2, 0),
    ),
    Case(
        "to_gradient_of_capped_logits",
        softmax_kernels.to_gradient_,
        lambda: (
            half(BLOCK, VOCABULARY, grad=False),
            ids(BLOCK, 1),
            *(single(BLOCK, 1) for _ in range(4)),
            30.0,
        ),
        (1, 0),
        (2, 0),
    ),
)

FP8 = (
    Case("largest", casting.LARGEST, lambda: (matrix(),), (2, 0), (1, 0)),
    Case(
        "quantize_rows",
        casting.QUANTIZE,
        lambda: (matrix(), None, E4M3, 1, "rows"),
        (1, 0),
        (1.5, 0),
    ),
    Case(
        "quantize_columns",
        casting.QUANTIZE,
        lambda: (matrix(), None, E5M2, 0, "columns"),
        (3, 0),
        (2.51, 0),
    ),
    Case(
        "known_scale",
        casting.KNOWN_SCALE,
        lambda: (single(), single(16), single(), 448.0),
        (1, 0),
        (20, 0),
    ),
)
