"""How a tiny run survives twelve kinds of faults, how fast, and what share of its time counts.

Each layout and seed is one run with all faults in a row, as with `tools/chaos.py`. With --minutes
the share of time is measured in a long run whose ranks are killed by chance, which takes twice as
long since an undisturbed run comes first, and simulated with its times at other rates.

    python benchmarks/chaos.py [--seeds 20] [--minutes 15] [--per-minute 4] [--save]
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from megatron_ext.device import select
from megatron_ext.extras.chaos.campaign import Campaign
from megatron_ext.extras.chaos.goodput import plot_goodput, simulated
from megatron_ext.extras.chaos.outcome import Result
from megatron_ext.extras.chaos.plan import TWELVE, draw, draw_by_time
from megatron_ext.extras.chaos.table import problems, summary
from megatron_ext.inspect.layouts import NamedLayout, parse_layout, split_layouts
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import silence_known_warnings

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0 "
    "--make-vocab-size-divisible-by 32 --attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
    "--split 100,0,0"
)
LONG_FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0 --num-workers 0 --split 100,0,0 "
    "--use-distributed-optimizer --peer-checkpoint-interval 4 --save-interval 500 "
    "--rerun-mode disabled --check-state-interval 1000000"
)
"""A model whose step takes 0.2 s, as every step of a long run must not be checked and copied."""
LAYOUTS = "tp2,pp2,cp2,dp2,tp2pp2,pp2dp2"
RATES = {"one in 10 minutes": 6.0, "one a minute": 60.0, "4 a minute": 240.0}
"""Faults per hour for which the share of time is simulated."""


def main() -> int:
    """Run all cases, print the tables, and return 1 if anything was not survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--layouts", default=LAYOUTS)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--per-minute", type=float, default=4.0)
    parser.add_argument("--save", action="store_true", help="write the tables to results/")
    args = parser.parse_args()
    silence_known_warnings(select().kind)
    lines = [f"{date.today()}  python {platform.python_version()}  torch {torch.__version__}  CPU"]
    lines += [f"python benchmarks/chaos.py {' '.join(sys.argv[1:])}", ""]
    with tempfile.TemporaryDirectory(prefix="chaos_") as name:
        campaign, results = Campaign(TEXT, FLAGS.split(), Path(name)), list[Result]()
        layouts = split_layouts(args.layouts)
        for layout in layouts:
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                results.append(run(campaign, layout, seed))
                print(f"> {layout.name} {seed} {results[-1].survived}", flush=True)
        if results:
            lines += [*as_markdown(summary(results)), "", *problems(results), ""]
        if args.minutes:
            lines += shares(Path(name) / "long", args)
    print("\n".join(lines))
    if args.save:
        path = ROOT / "benchmarks" / "results" / f"chaos_{date.today()}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all(result.survived for result in results) else 1


def run(campaign: Campaign, layout: NamedLayout, seed: int) -> Result:
    """Run one layout with all faults in a row."""
    step = campaign.truth(draw(TWELVE, layout, seed)).step_seconds
    return campaign.run(draw(TWELVE, layout, seed, step_seconds=step))


def shares(folder: Path, args: argparse.Namespace) -> Iterator[str]:
    """Run the long run, and yield lines on the share of time on steps that count.

    The share is measured at the rate of kills of that run, and simulated with its times at others.
    """
    campaign, layout = Campaign(TEXT, LONG_FLAGS.split(), folder), parse_layout("dp2")
    step = campaign.costs(layout).step
    case = draw_by_time(["SIGKILL"], layout, 0, args.minutes, args.per_minute, step_seconds=step)
    result = campaign.run(case)
    took = [o.resumed_after for o in result.outcomes if o.resumed_after is not None]
    costs, point = campaign.costs(layout, took), campaign.point(result)
    yield f"{layout.name}: {costs}"
    yield (
        f"measured: {len(case.faults)} kills in {result.seconds / 60:.1f} minutes "
        f"({point.faults_per_hour:.0f} an hour): {point.goodput:.2%} of the time on steps that "
        f"count; median {costs.restart:.2f} s to a new step; weights equal: {result.weights_equal}"
    )
    yield from problems([result])
    steps = round(600 / costs.step)
    for name, rate in RATES.items():
        share = simulated(costs, rate, save_interval=steps, hours=200.0)
        yield f"simulated, kills: {name}: {share:.2%} of the time on steps that count"
    if args.save:
        plot = ROOT / "benchmarks" / "results" / f"chaos_{date.today()}.png"
        plot_goodput(costs, [point], plot)


def as_markdown(rows: list[list[str]]) -> list[str]:
    """Return rows, of which the first has the headings, as lines of a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


if __name__ == "__main__":
    sys.exit(main())
