"""Implements `tools/chaos.py`: runs a program with injected faults, and prints their outcomes."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_ext.config.flags import COUNT, WEIGHT
from megatron_ext.config.tool_options import own_options
from megatron_ext.device import select
from megatron_ext.disk.writing import write_text
from megatron_ext.errors import ConfigError, tell_errors
from megatron_ext.extras.chaos.goodput import plot_goodput
from megatron_ext.inspect.layouts import NamedLayout, split_layouts
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import silence_known_warnings
from megatron_ext.train.task import later
from megatron_ext.video.task import VIDEO

if TYPE_CHECKING:
    from megatron_ext.extras.chaos.campaign import Campaign
    from megatron_ext.extras.chaos.outcome import Result

# Imported when they are called, so that help and a wrong option need no torch.
_HERE = "megatron_ext.extras.chaos"
as_rows = later(f"{_HERE}.table:as_rows")
campaign_of = later(f"{_HERE}.campaign:Campaign")
draw = later(f"{_HERE}.plan:draw")
draw_by_time = later(f"{_HERE}.plan:draw_by_time")
outcomes = later(f"{_HERE}.table:outcomes")
own_layout = later(f"{_HERE}.plan:own_layout")
parse_kinds = later(f"{_HERE}.plan:parse_kinds")
problems = later(f"{_HERE}.table:problems")

PROGRAMS = {"pretrain_gpt.py": TEXT, "pretrain_video.py": VIDEO}


def main(argv: Sequence[str], description: str) -> int:
    """Run all cases and print the table; return 0 if all runs survived, 1 if not, 2 on an error.

    Args:
        argv: the tool's flags, and after ``--`` those of the training program.
        description: text for ``--help``.
    """
    args, words = own_options(_parser(description), argv)
    silence_known_warnings(select().kind)
    folder = Path(args.folder or tempfile.mkdtemp(prefix="chaos_"))
    campaign: Campaign = campaign_of(PROGRAMS[args.program], words, folder)
    try:
        layouts = (
            split_layouts(args.layouts) if args.layouts else [own_layout(words, campaign.program)]
        )
        kinds = ["SIGKILL"] * args.kills if args.kills else parse_kinds(args.faults)
        results = []
        for result in run_all(campaign, kinds, layouts, args):
            results.append(result)
            case = f"{result.case.layout.name}, seed {result.case.seed}"
            print(f"> {case}: {'PASS' if result.survived else 'FAIL'}", flush=True)
        print(f"> added to your flags: {' '.join(campaign.added)}")
        report(campaign, results, args)
    except ConfigError as error:
        tell_errors(error.messages)
        return 2
    survived = all(result.survived for result in results)
    if survived and not args.folder:
        shutil.rmtree(folder)
    else:
        print(f"> the runs are kept in {folder}")
    return 0 if survived else 1


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kills", type=COUNT.integer, help="this many SIGKILLs, instead of --faults")
    add("--faults", default="all", help="comma-separated kinds of faults (all)")
    add("--layouts", help="comma-separated, such as tp2,pp2")
    add("--seeds", type=COUNT.integer, default=1, help="number of seeds of the moments (1)")
    add("--apart", action="store_true", help="give each fault a run of its own")
    add("--minutes", type=WEIGHT.number, help="train so long with faults by chance")
    add("--per-minute", type=WEIGHT.number, default=1.0, help="faults a minute, of --minutes (1)")
    add("--program", choices=PROGRAMS, default="pretrain_gpt.py", help="whose flags follow")
    add("--folder", help="keep all runs there; default: only failed ones are kept")
    add("--json", type=Path, help="write the table to this file")
    add("--plot", type=Path, help="draw goodput against the rate of faults to this PNG")
    return parser


def run_all(
    campaign: Campaign,
    kinds: Sequence[str],
    layouts: Sequence[NamedLayout],
    args: argparse.Namespace,
) -> Iterator[Result]:
    """Run each layout with each seed, and yield the result of each run.

    A run has all ``kinds`` of faults; with ``args.apart`` each kind has its own run, and with
    ``args.minutes`` faults come at random.
    """
    groups = [[kind] for kind in kinds] if args.apart else [kinds]
    for layout in layouts:
        # Checked at once, since the first runs take minutes.
        for group in groups if args.minutes is None else ():
            campaign.check(draw(group, layout, 0))
    for layout in layouts:
        for seed in range(args.seeds):
            if args.minutes is not None:
                step = campaign.truth(draw(["SIGKILL"] * 4, layout, 0)).step_seconds
                rates = args.minutes, args.per_minute
                yield campaign.run(draw_by_time(kinds, layout, seed, *rates, step_seconds=step))
                continue
            for group in groups:
                plain = draw(group, layout, seed)
                step = campaign.truth(plain).step_seconds
                yield campaign.run(draw(group, layout, seed, step_seconds=step))


def report(campaign: Campaign, results: Sequence[Result], args: argparse.Namespace) -> None:
    """Print the table and the problems, and write the files of ``--json`` and ``--plot``."""
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(outcomes(results))
    for line in problems(results):
        print(line)
    points = [campaign.point(result) for result in results] if args.minutes is not None else []
    for point in points:
        print(f"> {point.faults_per_hour:.0f} faults an hour: goodput {point.goodput:.2%}")
    if args.json is not None:
        write_text(args.json, json.dumps(as_rows(results), indent=1))
    if args.plot is not None:
        took = [outcome.resumed_after for result in results for outcome in result.outcomes]
        restarts = [seconds for seconds in took if seconds is not None]
        plot_goodput(campaign.costs(results[0].case.layout, restarts), points, args.plot)
