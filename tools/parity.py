#!/usr/bin/env python3
"""Proves on this machine that layouts train alike.

Runs the same flags on one rank and in each layout, from initialization, and prints the largest
relative difference of every loss, of the gradient norm, and of each parameter's gradient.

    python tools/parity.py --layouts tp2,pp2,cp2,tp2pp2 -- <flags of pretrain_gpt.py>

A layout joins parts: tpN ppN vppN cpN dpN epN etpN mbsN, sp (sequence parallel), ag or a2a (kind of
context parallelism), zbh1 or zbv (zero-bubble schedules), core1f1b or coreint (megatron-core's own
schedules), do (distributed optimizer). More flags may follow in brackets, such as pp2[--bf16].
Exit code 0: all pass; 1: one fails; 2: bad flags.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()


from collections.abc import Sequence

from rich.console import Console

from megatron_ext.config.flags import COUNT, WEIGHT
from megatron_ext.device import select
from megatron_ext.errors import ConfigError
from megatron_ext.inspect.parity import (
    NamedLayout,
    Parity,
    Tolerances,
    compare,
    parse_layout,
    record,
    split_layouts,
    table,
)
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import silence_known_warnings

DEFAULT = "tp2,tp2sp,pp2,pp2vpp2,cp2,cp2a2a,dp2,tp2pp2"


def main(argv: Sequence[str]) -> int:
    """Run all layouts and print the table; return the exit code."""
    own = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    words = list(argv[len(own) + 1 :])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", default=DEFAULT, help=f"comma-separated ({DEFAULT})")
    parser.add_argument("--against", default="dp1", help="the layout taken for the truth (dp1)")
    parser.add_argument("--steps", type=COUNT.integer, default=10, help="training steps (10)")
    parser.add_argument("--loss-tolerance", type=WEIGHT.number, default=Tolerances.loss)
    parser.add_argument("--gradient-tolerance", type=WEIGHT.number, default=Tolerances.gradient)
    args = parser.parse_args(own)
    try:
        layouts = split_layouts(args.layouts)
        truth = parse_layout(args.against)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tolerances = Tolerances(args.loss_tolerance, args.gradient_tolerance)
    return prove(words, truth, layouts, args.steps, tolerances)


def prove(
    words: Sequence[str],
    against: NamedLayout,
    layouts: Sequence[NamedLayout],
    steps: int,
    tolerances: Tolerances,
) -> int:
    """Run the truth, then each layout; return the exit code."""
    device = select()
    silence_known_warnings(device.kind)
    console = Console(width=None if sys.stdout.isatty() else 160)
    results: list[Parity] = []
    with tempfile.TemporaryDirectory(prefix="parity_") as name:
        truth = record(TEXT, words, against, steps, Path(name) / "truth", device)
        if truth.failure is not None:
            print(f"error: {against.name}: {truth.failure}", file=sys.stderr)
            return 2
        for index, layout in enumerate(layouts):
            mine = record(TEXT, words, layout, steps, Path(name) / str(index), device)
            results.append(compare(mine, truth, tolerances))
            print(f"> {layout.name}: {'PASS' if results[-1].passed else 'FAIL'}", flush=True)
            for path in mine.folder.glob("gradients_*"):
                path.unlink()
        console.print(table(results, truth, tolerances))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    run_program(main)
