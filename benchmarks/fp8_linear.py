"""A linear layer in bf16 and in fp8: its three matrix products, and our layer by its recipes.

Forward ``y = x w^T``, gradient of the input ``dx = dy w``, gradient of the weight ``dw = dy^T x``;
x is ``[m, k]``, w is ``[n, k]``. fp8 is ``torch._scaled_mm`` with one scale for each factor (the
tensorwise recipe): e4m3 forwards, e5m2 for the gradient of the output. Quantising takes the largest
entry, scales and casts, and where the product needs it, transposes. The error is the relative L2
distance to the same product in float64.

Below them stands our ColumnParallelLinear with all it does, forward and backward. Target G2 is
1.3 times bf16's speed where k is 4096 or more; of a whole run see `gpu_throughput.py`.

    python benchmarks/fp8_linear.py --out out/fp8_linear.md
    python benchmarks/fp8_linear.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from benchmarks.gpu_setup import (
    Results,
    add_device_flags,
    device_of,
    freed,
    one_rank,
    table_row,
)
from benchmarks.targets import FP8_OVER_BF16, verdict
from megatron_ext.config.precision import Fp8Config
from megatron_ext.device.rates import seconds_of
from megatron_ext.layers.fp8.linear import KeptWeights
from megatron_ext.layers.fp8.scaling import RECIPES, Parts
from megatron_ext.layers.linear import ColumnParallelLinear
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.parallel.context import ParallelContext

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = ((8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 8192, 8192))
TINY = ((64, 32, 48),)
WIDE = 4096
"""Width of the input from which fp8 is to be faster."""
HEAD = (
    "product", "m", "n", "k", "bf16 ms", "fp8 ms", "fp8 with quantising ms", "bf16 / fp8",
    "bf16 / fp8 with quantising", "error of bf16", "error of fp8", "verdict",
)  # fmt: skip


@dataclass(frozen=True)
class Product:
    """A product ``left @ right`` with a name; the factors are ``[m, k]`` and ``[k, n]``."""

    name: str
    left: Tensor
    right: Tensor
    left_dtype: torch.dtype
    right_dtype: torch.dtype


def products(m: int, n: int, k: int, device: torch.device) -> list[Product]:
    """Return the three products of a layer, of normal random numbers in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16, generator=generator)

    x, w, dy = draw(m, k), draw(n, k), draw(m, n)
    return [
        Product("forward", x, w.t(), E4M3, E4M3),
        Product("gradient of input", dy, w, E5M2, E4M3),
        Product("gradient of weight", dy.t(), x, E5M2, E4M3),
    ]


def quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the tensor in 8 bits, and the factor that brings it back, float32 ``[]``."""
    largest = x.abs().amax().float().clamp(min=1e-12)
    scale = torch.finfo(dtype).max / largest
    return (x * scale).to(dtype), scale.reciprocal()


def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Multiply 8-bit factors; the first lies row by row, the second column by column."""
    return torch._scaled_mm(
        a.contiguous(),
        b.t().contiguous().t(),
        scale_a=scale_a,
        scale_b=scale_b,
        out_dtype=torch.bfloat16,
        use_fast_accum=b.dtype == E4M3 == a.dtype,
    )


def prepared(product: Product) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both factors in 8 bits, lying as the product takes them, and their scales."""
    a, scale_a = quantised(product.left, product.left_dtype)
    b, scale_b = quantised(product.right, product.right_dtype)
    return a.contiguous(), b.t().contiguous().t(), scale_a, scale_b


def error(result: Tensor, product: Product) -> float:
    """Return the relative L2 distance to float64, of the first rows where there are many."""
    rows = min(512, product.left.size(0))
    truth = product.left[:rows].double() @ product.right.double()
    return float((result[:rows].double() - truth).norm() / truth.norm())


def row(product: Product, device: torch.device, repeats: int) -> str:
    """Return one line of the table."""
    m, k = product.left.shape
    n = product.right.size(1)
    names = product.name, m, n, k

    def in_bf16() -> Tensor:
        return product.left @ product.right

    try:
        factors = prepared(product)
        eight = multiply(*factors)
    except RuntimeError as failure:
        return table_row(*names, f"refused: {str(failure).splitlines()[0]}")
    ways: tuple[Callable[[], Tensor], ...] = (
        in_bf16,
        lambda: multiply(*factors),
        lambda: multiply(*prepared(product)),
    )
    bf16, bare, whole = (seconds_of(way, device, repeats=repeats) for way in ways)
    return table_row(
        *names,
        *(f"{1e3 * seconds:.3f}" for seconds in (bf16, bare, whole)),
        f"{bf16 / bare:.2f}",
        f"{bf16 / whole:.2f}",
        f"{error(in_bf16(), product):.1e}",
        f"{error(eight, product):.1e}",
        "no target",
    )


def our_layer(n: int, k: int, context: ParallelContext) -> ColumnParallelLinear:
    """Build a whole layer on this rank, without a bias, in bfloat16."""
    config = StepTransformerConfig(
        num_layers=1, hidden_size=k, num_attention_heads=1, params_dtype=torch.bfloat16
    )
    return ColumnParallelLinear(
        k,
        n,
        config=config,
        init_method=partial(torch.nn.init.normal_, std=0.02),
        bias=False,
        tp_group=context.pgs.tp,
    )


def one_pass(layer: ColumnParallelLinear, x: Tensor, gradient: Tensor) -> None:
    """Run forward and backward, as in a step of one micro-batch, which casts its weights once."""
    x.grad = layer.weight.grad = None
    with KeptWeights([layer]).kept():
        layer(x)[0].backward(gradient)


def layer_rows(
    shape: tuple[int, int, int],
    context: ParallelContext,
    device: torch.device,
    args: argparse.Namespace,
) -> Iterator[str]:
    """Return a line for each recipe."""
    m, n, k = shape
    layer = our_layer(n, k, context).to(device)
    x = torch.randn(m, 1, k, device=device, dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn(m, 1, n, device=device, dtype=torch.bfloat16)

    def seconds() -> float:
        return seconds_of(lambda: one_pass(layer, x, gradient), device, repeats=args.repeats)

    bf16 = seconds()
    parts = Parts(context.pgs, cuts_input=False, cuts_sequence=False)
    for recipe, scaling in RECIPES.items():
        layer.fp8 = scaling(Fp8Config(fp8_format="hybrid", fp8_recipe=recipe), parts).to(device)
        if recipe == "delayed":
            # Scales of steps before, whose values take no other time: those of a new layer, 1.
            layer.fp8.has_history = True
        names = f"layer, {recipe}", m, n, k
        try:
            whole = seconds()
        except RuntimeError as failure:
            yield table_row(*names, f"refused: {str(failure).splitlines()[0]}")
            continue
        yield table_row(
            *names,
            f"{1e3 * bf16:.3f}",
            "n/a",
            f"{1e3 * whole:.3f}",
            "n/a",
            f"{bf16 / whole:.2f}",
            "n/a",
            "n/a",
            verdict(args, [(FP8_OVER_BF16, bf16 / whole)] if k >= WIDE else []),
        )


def main(argv: Sequence[str]) -> int:
    """Print the table, and write it where ``--out`` and ``--save`` say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=20, help="whose median counts")
    add_device_flags(parser)
    args = parser.parse_args(argv)
    device = device_of(args)
    args.repeats = 2 if args.tiny else args.repeats
    results = Results("fp8_linear", argv, args, HEAD)
    with one_rank() as context:
        for shape in TINY if args.tiny else SHAPES:
            for product in products(*shape, device):
                with freed(device):
                    results.add(row(product, device, args.repeats))
            with freed(device):
                for line in layer_rows(shape, context, device, args):
                    results.add(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
