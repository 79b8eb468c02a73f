"""Throughput of pretrain_gpt.py's loop on one GPU, beside what a matrix product reaches there.

For each model size, implementation of the layers and precision: time of a step, tokens per second,
TFLOP/s of the model, their share of the matrix rate measured in this same run (the MFU) and of the
datasheet's, the peak of the memory, and fp8's speed over bf16's. Recomputation, which none of the
variants uses, would not count as work. What cannot run here says why in its row.

Targets: G1, an MFU of 60% of the torch layers in bf16 at 4096 to 8192 tokens; G2, 1.3 times
bf16's speed for the torch layers in fp8 where the hidden size is 4096 or more.

    python benchmarks/gpu_throughput.py --sizes 3b --seq-length 4096 --out out/throughput.md
    python benchmarks/gpu_throughput.py --device cpu --tiny

``--trace FOLDER`` records two more steps of each variant, writes their trace there, and prints
their kernels by class beside the plan's times, and the 40 longest (`benchmarks.compare_profile`).

Flags after ``--`` go to pretrain_gpt.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.compare_profile import print_comparison
from benchmarks.gpu_setup import (
    LLAMAS,
    Llama,
    Results,
    add_device_flags,
    built_run,
    ceiling,
    ceiling_dtype,
    device_of,
    freed,
    loss_of_step,
    one_rank,
    outcome_of,
    parsed_with_flags,
    peak_memory,
    table_row,
)
from benchmarks.targets import FP8_OVER_BF16, MFU, Target, verdict
from megatron_ext.config.output import GPU_NAMES
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.cost.products import flops_per_sample
from megatron_ext.train.loop import train
from megatron_ext.train.run import Run

IMPLEMENTATIONS = {"torch": "torch", "te": "transformer_engine"}
FP8 = ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe")
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
PRECISIONS = {
    "bf16": ("--bf16",),
    "bf16-graphs": ("--bf16", "--cuda-graph-impl", "local"),
    **{f"fp8-{recipe}": (*FP8, recipe) for recipe in RECIPES},
}
USUAL = ["bf16", "bf16-graphs", "fp8-delayed", "fp8-tensorwise"]
HEAD = (
    "model", "layers", "precision", "sequence", "batch", "ms per step", "tokens/s", "TFLOP/s",
    "MFU of measured", "of datasheet", "peak memory (GiB)", "loss", "fp8 / bf16", "verdict",
)  # fmt: skip
JUDGED_LENGTHS = range(4096, 8193)
WIDE = 4096
"""Hidden size from which fp8 is to be faster."""


@dataclass(frozen=True)
class Variant:
    """One row.

    Attributes:
        size: a name in `LLAMAS`.
        implementation: a name in `IMPLEMENTATIONS`.
        precision: a name in `PRECISIONS`.
        length: tokens of a sequence.
        batch: sequences of a step.
        extra: more flags of pretrain_gpt.py.
    """

    size: str
    implementation: str
    precision: str
    length: int
    batch: int
    extra: tuple[str, ...] = ()

    @property
    def model(self) -> Llama:
        return LLAMAS[self.size]

    @property
    def flags(self) -> list[str]:
        return [
            *self.model.flags(self.length, self.batch),
            "--transformer-impl",
            IMPLEMENTATIONS[self.implementation],
            *PRECISIONS[self.precision],
            *self.extra,
        ]

    @property
    def label(self) -> str:
        """Return the names in one word, for a file."""
        return "_".join(map(str, self.names))

    @property
    def names(self) -> tuple[object, ...]:
        return self.size, self.implementation, self.precision, self.length, self.batch


@dataclass(frozen=True)
class Timing:
    """Numbers of timed rounds, of their steps, and of steps before them."""

    rounds: int
    steps: int
    warm_up: int


def seconds_per_step(run: Run, timing: Timing) -> float:
    """Return the median over the rounds of the mean time of a step of the loop."""
    times = []
    for number in range(timing.rounds + 1):
        steps = timing.steps if number else timing.warm_up
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run.num_iterations = run.progress.iteration + steps
        train(run)
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times[1:])


@dataclass(frozen=True)
class Measured:
    """The result of a variant.

    Attributes:
        seconds: duration of a step.
        tokens, flops: per second.
        mfu: share of the matrix rate that was measured.
        cells: cells of the table after the variant's names.
    """

    seconds: float
    tokens: float
    flops: float
    mfu: float
    cells: tuple[str, ...]


TRACED_STEPS = 2


def record(run: Run, path: Path) -> None:
    """Train `TRACED_STEPS` more steps, and write the profiler's trace of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    run.num_iterations = run.progress.iteration + TRACED_STEPS
    with torch.profiler.profile(record_shapes=True) as profiler:
        train(run)
        if run.device.type == "cuda":
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def measure(
    variant: Variant,
    timing: Timing,
    context: ParallelContext,
    device: torch.device,
    *,
    tiny: bool,
    trace: Path | None = None,
) -> Measured:
    """Train a variant for a while; with ``trace`` also record steps into this folder.

    Raises:
        ConfigError: it cannot run here.
    """
    run = built_run(variant.flags, context, device)
    asked = IMPLEMENTATIONS[variant.implementation]
    if run.config.model.transformer_impl != asked:
        raise ConfigError(f"`--transformer-impl {asked}` has no effect on this device")
    seconds = seconds_per_step(run, timing)
    tokens = variant.batch * variant.length / seconds
    flops = tokens * flops_per_sample(run.config) / variant.length
    top = ceiling(device, ceiling_dtype(device, variant.precision), tiny=tiny)
    cells = (
        f"{1e3 * seconds:.1f}",
        f"{tokens:,.0f}",
        f"{flops / 1e12:.4g}",
        *top.shares(flops),
        peak_memory(device),
        f"{loss_of_step(run):.3f}",
    )
    if trace is not None:
        record(run, trace / f"{variant.label}.json")
    return Measured(seconds, tokens, flops, flops / top.measured, cells)


class Judge:
    """Compares fp8 with its bf16, and knows which targets a variant has."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._tokens: dict[Variant, float] = {}

    def last_cells(self, variant: Variant, found: Measured) -> list[str]:
        """Return the speed over bf16's, and the verdict."""
        self._tokens[variant] = found.tokens
        ratio = None
        if variant.precision != "bf16":
            twin = self._tokens.get(dataclasses.replace(variant, precision="bf16"))
            ratio = None if twin is None else found.tokens / twin
        shown = "n/a" if ratio is None else f"{ratio:.3f}"
        return [shown, verdict(self.args, targets(variant, found.mfu, ratio))]


def targets(
    variant: Variant, mfu: float, over_bf16: float | None
) -> list[tuple[Target, float | None]]:
    """Return the targets of the torch layers; Transformer Engine's have none."""
    if variant.implementation != "torch":
        return []
    if variant.precision.startswith("fp8"):
        return [(FP8_OVER_BF16, over_bf16)] if variant.model.hidden >= WIDE else []
    judged = variant.size in ("3b", "4b") and variant.length in JUDGED_LENGTHS
    return [(MFU, mfu)] if judged else []


def variants(args: argparse.Namespace) -> list[Variant]:
    """Return all rows, in order."""
    return [
        Variant(size, implementation, precision, length, args.batch, args.flags)
        for size in args.sizes
        for length in args.seq_length
        for implementation in args.implementations
        for precision in args.precisions
    ]


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", choices=tuple(LLAMAS), default=["3b", "4b"])
    parser.add_argument("--seq-length", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument(
        "--implementations", nargs="+", choices=tuple(IMPLEMENTATIONS), default=["torch", "te"]
    )
    parser.add_argument("--precisions", nargs="+", choices=tuple(PRECISIONS), default=USUAL)
    parser.add_argument("--rounds", type=int, default=5, help="whose median counts")
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="record steps into it")
    add_device_flags(parser)
    args = parsed_with_flags(parser, argv)
    if args.tiny:
        args.sizes, args.seq_length, args.batch = ["tiny"], [32], 2
        args.rounds, args.steps, args.warm_up = 2, 1, 1
    return args


def main(argv: Sequence[str]) -> int:
    """Print the table, and write it where ``--out`` and ``--save`` say."""
    args = parsed(argv)
    device = device_of(args)
    results, judge = Results("gpu_throughput", argv, args, HEAD), Judge(args)
    timing = Timing(args.rounds, args.steps, args.warm_up)
    with one_rank() as context:
        for variant in variants(args):

            def cells(variant: Variant = variant) -> list[str]:
                found = measure(variant, timing, context, device, tiny=args.tiny, trace=args.trace)
                return [*found.cells, *judge.last_cells(variant, found)]

            with freed(device):
                results.add(table_row(*variant.names, *outcome_of(cells)))
    for variant in variants(args) if args.trace is not None else ():
        trace = args.trace / f"{variant.label}.json"
        if trace.is_file():
            compare(trace, variant)
    return 0


def compare(trace: Path, variant: Variant) -> None:
    """Print a variant's kernels beside the plan, and keep the tables next to the trace."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"
    kind = next((name for name in GPU_NAMES if name in gpu), "H200")
    out = trace.with_suffix(".md")
    print_comparison(trace, variant.flags, gpu=kind, steps=TRACED_STEPS, out=out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
