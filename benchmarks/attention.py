"""Our attention beside each backend of torch's SDPA: forward and backward, on the same tensors.

Ours is the module that the torch layers use, with its own choice of kernel. Times are medians by
CUDA's events. TFLOP/s count the two products of the forward pass and the five of the backward one
(of flash attention, which computes the scores twice), half of them where the mask is causal.

Target G4: ours takes at most 1.05 times what the fastest backend takes.

    python benchmarks/attention.py --out out/attention.md
    python benchmarks/attention.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_setup import (
    Results,
    add_device_flags,
    device_of,
    freed,
    one_rank,
    peak_memory,
    table_row,
)
from benchmarks.targets import ATTENTION, verdict
from megatron_ext.device.rates import seconds_of
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.parallel.context import ParallelContext

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HEAD = (
    "sequence", "batch", "heads", "groups", "head size", "mask", "attention", "ms", "TFLOP/s",
    "time / fastest backend", "peak memory (GiB)", "difference to math",
    "verdict",
)  # fmt: skip
PRODUCTS = 7


@dataclass(frozen=True)
class Shape:
    """The sizes of a call: s tokens, b sequences, n heads, g key and value heads, d per head."""

    s: int
    b: int
    n: int
    g: int
    d: int
    causal: bool = True

    @property
    def flops(self) -> float:
        """Return the floating-point operations of a forward and a backward pass."""
        whole = PRODUCTS * 2.0 * self.b * self.n * self.s * self.s * self.d
        return whole / 2 if self.causal else whole

    @property
    def names(self) -> tuple[object, ...]:
        mask = "causal" if self.causal else "none"
        return self.s, self.b, self.n, self.g, self.d, mask


SHAPES = (
    Shape(4096, 2, 24, 8, 128),
    Shape(8192, 1, 32, 8, 128),
    Shape(8192, 1, 24, 24, 128, causal=False),
    Shape(32768, 1, 24, 24, 128, causal=False),
)
"""Shapes of a decoder and, without a mask, of a video transformer."""
TINY = (Shape(32, 2, 4, 2, 16), Shape(32, 1, 4, 4, 16, causal=False))


@dataclass(frozen=True)
class Inputs:
    """Tensors in megatron-core's order ``[s, b, n, d]`` (keys and values ``[s, b, g, d]``)."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value


def make_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw normal random numbers; the gradient belongs to the output ``[s, b, n * d]``."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype, generator=generator)

    of_key = (shape.s, shape.b, shape.g, shape.d)
    leaves = [draw(shape.s, shape.b, shape.n, shape.d), draw(*of_key), draw(*of_key)]
    query, key, value = (leaf.requires_grad_() for leaf in leaves)
    return Inputs(query, key, value, draw(shape.s, shape.b, shape.n * shape.d))


def through_sdpa(inputs: Inputs, shape: Shape) -> Tensor:
    """Call torch's function on the same memory; the result is ``[s, b, n * d]``."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in inputs.leaves)
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=shape.causal, enable_gqa=shape.n != shape.g
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def ours(shape: Shape, context: ParallelContext) -> DotProductAttention:
    """Build the module of the torch layers."""
    config = StepTransformerConfig(
        num_layers=1,
        hidden_size=shape.n * shape.d,
        num_attention_heads=shape.n,
        num_query_groups=shape.g,
        kv_channels=shape.d,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    mask = AttnMaskType.causal if shape.causal else AttnMaskType.no_mask
    return DotProductAttention(config, 1, mask, "self", pg_collection=context.pgs)


def one_pass(attend: Callable[[], Tensor], inputs: Inputs) -> Tensor:
    """Run forward and backward; return the output."""
    for leaf in inputs.leaves:
        leaf.grad = None
    out = attend()
    out.backward(inputs.gradient)  # type: ignore[no-untyped-call]
    return out.detach()


def ways(inputs: Inputs, shape: Shape, context: ParallelContext) -> dict[str, Callable[[], Tensor]]:
    """Return passes by name; math comes first, and the others are compared with it."""

    def with_backend(backend: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return one_pass(lambda: through_sdpa(inputs, shape), inputs)

        return run

    names = sorted(BACKENDS, key=lambda name: name != "math")
    found = {name: with_backend(BACKENDS[name]) for name in names}
    module = ours(shape, context)
    found["ours"] = lambda: one_pass(
        lambda: module(inputs.query, inputs.key, inputs.value, None), inputs
    )
    return found


def outputs_of(run: Callable[[], Tensor], inputs: Inputs) -> list[Tensor]:
    """Return output and gradients of one pass."""
    out = run()
    gradients = [leaf.grad for leaf in inputs.leaves]
    return [out, *(g for g in gradients if g is not None)]


def difference(mine: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Return the largest relative L2 distance of the output and the gradients."""
    return max(
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(mine, truth, strict=True)
    )


@dataclass(frozen=True)
class Found:
    """The result of one way: seconds, GiB and difference to math, or why it does not run."""

    seconds: float = 0.0
    memory: str = ""
    difference: float = 0.0
    refusal: str = ""


def measure(
    shape: Shape, context: ParallelContext, device: torch.device, dtype: torch.dtype, repeats: int
) -> dict[str, Found]:
    """Measure every way on one shape."""
    inputs = make_inputs(shape, device, dtype)
    truth: list[Tensor] | None = None
    found: dict[str, Found] = {}
    for name, run in ways(inputs, shape, context).items():
        with freed(device):
            try:
                outputs = outputs_of(run, inputs)
                truth = truth or outputs
                seconds = seconds_of(run, device, repeats=repeats)
                found[name] = Found(seconds, peak_memory(device), difference(outputs, truth))
            except torch.OutOfMemoryError:
                found[name] = Found(refusal="out of memory")
            except RuntimeError as error:  # "No available kernel", its reasons are warnings
                found[name] = Found(refusal=str(error).splitlines()[0].rstrip("."))
    return found


def rows(shape: Shape, found: dict[str, Found], args: argparse.Namespace) -> list[str]:
    """Return the lines of a shape."""
    times = [f.seconds for name, f in found.items() if name != "ours" and not f.refusal]
    fastest = min(times, default=float("nan"))
    lines = []
    for name, one in found.items():
        cells = [one.refusal]
        if not one.refusal:
            cells = [
                f"{1e3 * one.seconds:.3f}",
                f"{shape.flops / one.seconds / 1e12:.4g}",
                f"{one.seconds / fastest:.3f}",
                one.memory,
                f"{one.difference:.1e}",
                verdict(args, [(ATTENTION, one.seconds / fastest)] if name == "ours" else []),
            ]
        lines.append(table_row(*shape.names, name, *cells))
    return lines


def main(argv: Sequence[str]) -> int:
    """Print the table, and write it where ``--out`` and ``--save`` say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20, help="whose median counts")
    add_device_flags(parser)
    args = parser.parse_args(argv)
    device = device_of(args)
    repeats = 2 if args.tiny else args.repeats
    results = Results("attention", argv, args, HEAD)
    with one_rank() as context:
        for shape in TINY if args.tiny else SHAPES:
            found = measure(shape, context, device, getattr(torch, args.dtype), repeats)
            results.add(*rows(shape, found, args))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
