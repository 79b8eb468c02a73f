"""Proves on this machine that different parallel layouts train alike.

Trains from initialization with the same flags on one rank and in each layout. Prints the largest
relative difference of every loss, of the gradient norm, and of each parameter's gradient.

    python tools/parity.py --layouts tp2,pp2,cp2,tp2pp2 -- <flags of pretrain_gpt.py>

A layout is a sequence of words: tpN ppN vppN cpN dpN epN etpN mbsN, sp (sequence parallel), ag or
a2a (kind of context parallelism), zbh1, zbv or dpv (zero-bubble schedules and DualPipe-V), core1f1b
or coreint (megatron-core's own schedules), do (distributed optimizer). Further flags may follow in
brackets, such as pp2[--bf16].

    python tools/parity.py --cores 0.16.1,0.19.2 --layouts tp2,pp2 -- <flags of pretrain_gpt.py>

also trains with each of these releases of megatron-core, and compares all runs with the run on one
rank of the first release. It looks for the releases in the running Python, in .venv, and in
.venv-core-*, which `CORE=0.19 bash tests/run.sh` creates.

Exit code 0: all pass; 1: one fails; 2: bad flags, or dropout that depends on the layout.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_ext.config.flags import COUNT, WEIGHT
from megatron_ext.config.tool_options import own_options
from megatron_ext.device import Device, select
from megatron_ext.errors import ConfigError, tell_errors
from megatron_ext.inspect.layouts import (
    NamedLayout,
    parse_layout,
    refuse_random_draws,
    split_layouts,
)
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import silence_known_warnings
from megatron_ext.train.task import later

if TYPE_CHECKING:
    from megatron_ext.inspect.cores import Environment
    from megatron_ext.inspect.parity import Parity, Recording, Tolerances

# Imported when they are called, so that help and a wrong option need no torch.
_CORES = "megatron_ext.inspect.cores"
choose_environments = later(f"{_CORES}:choose_environments")
record_on = later(f"{_CORES}:record_on")
serve = later(f"{_CORES}:serve")
_PARITY = "megatron_ext.inspect.parity"
compare = later(f"{_PARITY}:compare")
record = later(f"{_PARITY}:record")
table = later(f"{_PARITY}:table")
tolerances_of = later(f"{_PARITY}:Tolerances")

ROOT = Path(__file__).resolve().parents[2]
START = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from megatron_ext.programs import run
run("parity")
"""
"""Code that starts this program in another Python environment."""
DEFAULT = "tp2,tp2sp,pp2,pp2vpp2,cp2,cp2a2a,dp2,tp2pp2"


def main(argv: Sequence[str]) -> int:
    """Train in all layouts and print the table of differences; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layouts", default=DEFAULT, help=f"layouts to run, separated by commas ({DEFAULT})"
    )
    parser.add_argument("--against", default="dp1", help="layout to compare others with (dp1)")
    parser.add_argument("--cores", help="releases of megatron-core, such as 0.16.1,0.19.2")
    parser.add_argument("--steps", type=COUNT.integer, default=10, help="training steps (10)")
    parser.add_argument(
        "--loss-tolerance",
        type=WEIGHT.number,
        dest="loss",
        default=argparse.SUPPRESS,
        help="largest relative difference of losses and gradient norms that passes (1e-6)",
    )
    parser.add_argument(
        "--gradient-tolerance",
        type=WEIGHT.number,
        dest="gradient",
        default=argparse.SUPPRESS,
        help="largest relative difference of a gradient that passes (1e-5)",
    )
    parser.add_argument("--record-into", type=Path, help=argparse.SUPPRESS)
    args, words = own_options(parser, argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    device = select()
    silence_known_warnings(device.kind)
    try:
        layouts = split_layouts(args.layouts)
        if args.record_into is not None:
            serve(TEXT, words, layouts, args.steps, args.record_into, device)
            return 0
        truth = parse_layout(args.against)
        cores = choose_environments(args.cores, ROOT) if args.cores is not None else []
        refuse_random_draws(TEXT, words, truth, layouts, args.steps, device)
    except ConfigError as error:
        tell_errors(error.messages)
        return 2
    given = {name: value for name, value in vars(args).items() if name in ("loss", "gradient")}
    tolerances = tolerances_of(**given)
    with tempfile.TemporaryDirectory(prefix="parity_") as name:
        runs = train(words, truth, layouts, args.steps, cores, Path(name), device)
        return prove(runs, layouts, tolerances)


def train(
    words: Sequence[str],
    against: NamedLayout,
    layouts: Sequence[NamedLayout],
    steps: int,
    cores: Sequence[Environment],
    folder: Path,
    device: Device,
) -> Generator[Recording]:
    """Train the reference layout ``against``, then the others, and yield their recordings.

    With several ``cores``, releases of megatron-core, do this for each of them in turn. On every
    release but the first, the reference layout is compared like any other layout.
    """
    if not cores:
        for index, layout in enumerate([against, *layouts]):
            yield record(TEXT, words, layout, steps, folder / str(index), device)
    for core in cores:
        others = [layout for layout in layouts if core is cores[0] or layout != against]
        own = folder / core.core
        yield from record_on(core, START, words, [against, *others], steps, own)


def prove(
    recordings: Generator[Recording], layouts: Sequence[NamedLayout], tolerances: Tolerances
) -> int:
    """Compare each recording with the first one, print the table, and return the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 170)
    results: list[Parity] = []
    with closing(recordings):
        truth = next(recordings)
        if truth.failure is not None:
            tell_errors([f"{truth.label}: {truth.failure}"])
            return 2
        for mine in recordings:
            results.append(compare(mine, truth, tolerances))
            print(f"> {mine.label}: {'PASS' if results[-1].passed else 'FAIL'}", flush=True)
            for path in mine.folder.glob("gradients_*"):
                path.unlink()
    # Group the rows by layout. Rows of the reference layout, on other cores, come first.
    order = {layout: index for index, layout in reversed(list(enumerate(layouts)))}
    results.sort(key=lambda result: order.get(result.recording.layout, -1))
    console.print(table(results, truth, tolerances))
    return 0 if all(result.passed for result in results) else 1
