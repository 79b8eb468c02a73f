"""Every compiled function of the layers with arguments that reach all of its branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers import pointwise

S, B, H, N, D = 12, 2, 64, 4, 16
RMS: pointwise.NormSpec = ("RMSNorm", 1e-5, False)
LAYER: pointwise.NormSpec = ("LayerNorm", 1e-5, False)


@dataclass(frozen=True)
class Size:
    """A tensor to be drawn; ``kind`` says from what: normal, in [0, 1), or positive."""

    shape: tuple[int, ...]
    kind: str = "normal"
    trains: bool = True


def t(*shape: int, kind: str = "normal", trains: bool = True) -> Size:
    return Size(shape, kind, trains)


@dataclass(frozen=True)
class Case:
    """A function and its arguments, tensors by their `Size`."""

    name: str
    function: Callable[..., Any]
    arguments: Sequence[Any]

    def drawn(self, device: str = "cpu") -> list[Any]:
        """Return arguments in float64, the same ones each time."""
        generator = torch.Generator().manual_seed(3)
        return [
            _draw(x, generator).to(device) if isinstance(x, Size) else x for x in self.arguments
        ]


def _draw(size: Size, generator: torch.Generator) -> Tensor:
    make = torch.randn if size.kind == "normal" else torch.rand
    x = make(size.shape, generator=generator, dtype=torch.float64)
    if size.kind == "positive":
        x = x + 1
    # Exact in half precision, so that every dtype is given the same numbers.
    return x.bfloat16().double().requires_grad_(size.trains)


def run(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the outputs, then the gradients of all arguments that train."""
    found = function(*arguments)
    outputs = (found,) if isinstance(found, Tensor) else tuple(found)
    loss: Any = 0
    for number, output in enumerate(outputs):
        weights = torch.sin(torch.arange(output.numel(), dtype=torch.float64) + number)
        loss = loss + (output.double() * weights.view_as(output).to(output.device)).sum()
    trained = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(loss, trained)
    return *(x.detach() for x in outputs), *gradients


def cast(arguments: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Return the arguments in another dtype."""
    return [
        x.detach().to(dtype).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in arguments
    ]


def _norms() -> Iterator[Case]:
    for kind, bias in (("RMSNorm", None), ("LayerNorm", t(H))):
        for zero_centered in (False, True):
            spec = (kind, 1e-5, zero_centered)
            arguments = [t(S, B, H), t(H), bias, spec]
            yield Case(f"{kind} {zero_centered}", pointwise.normed, arguments)
            yield Case(
                f"{kind} with residual {zero_centered}", pointwise.norm_with_residual, arguments
            )
    frozen = [t(S, B, H), t(H, trains=False), None, RMS]
    yield Case("frozen norm with residual", pointwise.norm_with_residual, frozen)


def _residuals() -> Iterator[Case]:
    x, residual = t(S, B, H), t(S, B, H)
    for bias in (None, t(H)):
        name = "bias" if bias else "no bias"
        yield Case(f"add {name}", pointwise.bias_dropout_add, [x, bias, residual, 0.0, True])
        arguments = [x, bias, residual, 0.0, True, t(H), bias, LAYER if bias else RMS]
        yield Case(f"add and norm {name}", pointwise.bias_dropout_add_norm, arguments)
        drawn = t(S, B, H, kind="unit", trains=False)
        masked = [x, bias, residual, drawn, 0.25]
        yield Case(f"masked add {name}", pointwise.masked_bias_dropout_add, masked)


def _activations() -> Iterator[Case]:
    for name in pointwise.ACTIVATIONS:
        for gated in (False, True):
            wide = [t(S, B, 2 * H), t(2 * H), None, name, gated]
            yield Case(f"{name} gated={gated}", pointwise.activated, wide)
    tokens = [t(S, 2 * H), None, t(S, 1, kind="unit"), "silu", True]
    yield Case("expert", pointwise.activated, tokens)


def _heads() -> Iterator[Case]:
    table = t(S, 1, 1, D // 4, trains=False), t(S, 1, 1, D // 4, trains=False)
    projected = t(S, B, 2 * (N // 2 + 2) * D)
    for interleaved in (False, True):
        plain = [projected, None, 2, D, *table, interleaved, None, None, None, None, None]
        yield Case(f"heads interleaved={interleaved}", pointwise.queries_keys_values, plain)
    bias = t(2 * (N // 2 + 2) * D)
    rms = [projected, bias, 2, D, *table, False, t(D), None, t(D), None, RMS]
    layer = [projected, None, 2, D, None, None, False, t(D), t(D), t(D), t(D), LAYER]
    yield Case("heads with RMSNorm", pointwise.queries_keys_values, rms)
    yield Case("heads with LayerNorm", pointwise.queries_keys_values, layer)


CASES = [*_norms(), *_residuals(), *_activations(), *_heads()]
