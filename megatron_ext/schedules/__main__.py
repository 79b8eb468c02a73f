"""Draw a pipeline schedule and simulate its time, without starting a process.

Example: python -m megatron_ext.schedules --schedule zb-v --pipeline-size 4 --microbatches 16
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_ext.config.flags import FACTOR, SIZE, WEIGHT
from megatron_ext.config.parallel import V_SHAPED
from megatron_ext.errors import ConfigError, run_program, tell_errors
from megatron_ext.schedules.orders import SCHEDULES, build_plan
from megatron_ext.schedules.picture import save, text
from megatron_ext.schedules.plan import Durations
from megatron_ext.schedules.price import price


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.schedules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size: Any = {"type": SIZE.integer, "metavar": "N"}
    times = "times of forward pass, input gradient and weight gradient of all of a rank's layers"
    even: Any = {"nargs": 3, "default": [1.0, 1.0, 1.0], "metavar": ("F", "I", "W")}
    group = "micro-batches that an interleaved chunk handles before the next chunk"
    parser.add_argument("--schedule", default="1f1b", choices=SCHEDULES, help="which plan")
    parser.add_argument(
        "--pipeline-size", type=SIZE.integer, default=4, metavar="RANKS", help="pipeline ranks"
    )
    parser.add_argument("--microbatches", **size, default=8, help="micro-batches of a step")
    parser.add_argument("--chunks", **size, help="model chunks on each rank")
    parser.add_argument("--group-size", **size, help=group)
    parser.add_argument("--times", type=FACTOR.number, help=times, **even)
    parser.add_argument(
        "--latency", type=WEIGHT.number, default=0.0, help="of a message, in the same unit"
    )
    parser.add_argument(
        "--pairs", action="store_true", help="pair forward passes with backward passes"
    )
    parser.add_argument(
        "--hidden",
        type=WEIGHT.number,
        default=0.0,
        help="time of all of a rank's layers that a pair takes less than its two passes",
    )
    parser.add_argument("--forward-only", action="store_true", help="plan an evaluation step")
    parser.add_argument("--png", type=Path, help="PNG file to draw the plan into")
    return parser


def main(argv: list[str]) -> int:
    """Print the timeline, step time, bubble and peak memory of a plan; return the exit code."""
    args = _parser().parse_args(argv)
    chunks = args.chunks or (2 if args.schedule in ("interleaved", *V_SHAPED) else 1)
    durations = Durations(*(time / chunks for time in (*args.times, args.hidden)))
    try:
        plan = build_plan(
            args.schedule,
            pipeline_size=args.pipeline_size,
            num_microbatches=args.microbatches,
            num_chunks=chunks,
            group_size=args.group_size,
            forward_only=args.forward_only,
            durations=durations,
            pairs=args.pairs,
        )
        cost = price(plan, durations, args.latency)
        print(text(plan, cost))
        print(f"step time {cost.makespan:g}, bubble {cost.bubble:g} ({cost.bubble_share:.1%})")
        peaks = ", ".join(f"{peak / chunks:g}" for peak in cost.peak_activations)
        print(f"peak micro-batches in flight on each rank, of all its layers: {peaks}")
        if args.png is not None:
            save(plan, cost, args.png)
            print(f"wrote {args.png}")
    except ConfigError as error:
        tell_errors(error.messages)
        return 2
    return 0


if __name__ == "__main__":
    run_program(main)
