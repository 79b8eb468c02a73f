#!/usr/bin/env python3
"""Plan a run on any number of GPUs, without a GPU and without starting anything.

Prints all errors of the flags. If there are none, prints parameters and memory of each pipeline
stage, the bubble of the schedule, the bytes of each kind of communication, estimated step time and
MFU, the time of each class of kernels with the assumed rates, and whether the run fits into memory.

    python tools/plan.py --world-size 64 --gpu H100 [--png plan.png] -- <flags of pretrain_gpt.py>
    python tools/plan.py --world-size 64 --gpu H100 --search -- <flags of pretrain_gpt.py>
    python tools/plan.py --world-size 64 --gpu H200 --video -- <flags of pretrain_video.py>

``--gpu`` also takes a file that ``tools/doctor.py --json`` has written, whose measured rates then
replace the assumed ones. ``--search`` tries tensor, pipeline, virtual, context and expert sizes,
micro-batches and recomputation, and lists the fastest layouts that fit. The vocabulary size comes
from the tokenizer, or from ``--padded-vocab-size``; the lengths of videos come from their data.
Exit code 0: the run fits; 1: it does not; 2: the flags have errors.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.config.flags import COUNT, SIZE
from megatron_ext.config.output import GPU_NAMES
from megatron_ext.config.parser import ParsedArgs, parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.layers.transformer_config import check_core
from megatron_ext.planning.hardware import gpu_named
from megatron_ext.planning.memory import worst_case
from megatron_ext.planning.report import console, save_pictures, search_table, show
from megatron_ext.planning.step_time import search
from megatron_ext.planning.task_cost import TaskCost
from megatron_ext.text.run import with_tokenizer
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import preflight, silence_known_warnings
from megatron_ext.train.task import TaskChoice
from megatron_ext.video.task import VIDEO


def main(argv: Sequence[str]) -> int:
    """Print the plan of a run; return the exit code."""
    own = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    words = list(argv[len(own) + 1 :])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--world-size", type=SIZE.integer, required=True, metavar="N", help="number of GPUs"
    )
    parser.add_argument(
        "--gpu", default="H100", help=f"kind of GPU: {', '.join(GPU_NAMES)}, or a .json file (H100)"
    )
    parser.add_argument("--search", action="store_true", help="list the fastest layouts")
    parser.add_argument("--video", action="store_true", help="read flags of pretrain_video.py")
    parser.add_argument(
        "--count", type=COUNT.integer, default=10, metavar="N", help="layouts to list (10)"
    )
    parser.add_argument("--png", type=Path, help="draw schedule and memory")
    args = parser.parse_args(own)
    silence_known_warnings("cpu")
    try:
        gpu = gpu_named(args.gpu, "--gpu")
        if args.video:
            refuse_for_video(args)
            config, cost = read_video(words, args.world_size, args.gpu)
        else:
            config, cost = read(words, 1 if args.search else args.world_size, args.gpu)
        if args.search:
            return propose(config, args.world_size, gpu, cost, args.count)
        return plan(config, gpu, cost, args.png)
    except MegatronExtError as error:
        print("\n".join(f"error: {text}" for text in error.messages), file=sys.stderr)
        return 2


def read(words: Sequence[str], world_size: int, gpu: str) -> tuple[RunConfig, TaskCost | None]:
    """Return the configuration of the text run that flags describe, and its cost model.

    Raises:
        ConfigError: the flags have errors; the exception has a sentence for each.
    """
    arguments = parsed(words, TEXT, world_size, gpu)
    config: RunConfig = arguments.config
    if not config.model.padded_vocab_size:
        config, _ = with_tokenizer(config)
    return config, arguments.task.cost


def read_video(
    words: Sequence[str], world_size: int, gpu: str
) -> tuple[RunConfig, TaskCost | None]:
    """Open the data of a video run; return the configuration and the cost model of the run.

    Raises:
        ConfigError, DataError: flags or data have errors; the exception has a sentence for each.
    """
    arguments = parsed(words, VIDEO, world_size, gpu)
    config, _ = preflight(arguments.config, arguments.task.preflight)
    return config, arguments.task.cost


def parsed(words: Sequence[str], program: TaskChoice, world_size: int, gpu: str) -> ParsedArgs:
    """Parse the flags of a run for a dry run without its GPUs; print notes on the flags."""
    planned = {"dry_run": True, "dry_run_gpu": gpu}
    arguments = parse_args(words, program, world_size=world_size, device="cuda", defaults=planned)
    for note in arguments.notes:
        print(f"> {note}")
    return arguments


def refuse_for_video(args: argparse.Namespace) -> None:
    """Raise a ConfigError with a sentence on each given option that is only for text models."""
    given = {"search": args.search, "png": args.png is not None}
    errors = [
        f"`--{name}` is there for text models alone; leave it out with `--video`."
        for name, is_given in given.items()
        if is_given
    ]
    if errors:
        raise ConfigError(errors)


def plan(config: RunConfig, gpu: Gpu, cost: TaskCost | None, png: Path | None) -> int:
    """Print the plan, draw its pictures into ``png`` if given, and return the exit code."""
    check_core(config)
    fits = show(config, gpu, cost)
    if png is not None and cost is not None:
        network, _ = worst_case(cost.cases(config))
        print("wrote " + " and ".join(str(path) for path in save_pictures(network, png, gpu)))
    return 0 if fits else 1


def propose(config: RunConfig, world_size: int, gpu: Gpu, cost: TaskCost | None, count: int) -> int:
    """Print a table of the ``count`` fastest layouts that fit.

    Return the exit code: 1 if no layout fits, else 0.
    """
    assert cost is not None
    result = search(config, TEXT.choose(config), world_size, gpu, cost, count=count)
    console().print(search_table(result))
    return 0 if result.best else 1


if __name__ == "__main__":
    run_program(main)
