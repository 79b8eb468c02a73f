#!/usr/bin/env python3
"""What a run would take on any number of GPUs, without a GPU and without starting anything.

Prints all errors of the flags, or: parameters and memory of each pipeline stage, the bubble of the
schedule, the bytes of each kind of communication, estimated step time and MFU, and whether it fits.

    python tools/plan.py --world-size 64 --gpu H100 [--png plan.png] -- <flags of pretrain_gpt.py>
    python tools/plan.py --world-size 64 --gpu H100 --search -- <flags of pretrain_gpt.py>
    python tools/plan.py --world-size 64 --gpu H200 --video -- <flags of pretrain_video.py>

``--gpu`` takes a file as well that ``tools/doctor.py --json`` wrote: its measured rates then take
the place of assumed ones. ``--search`` tries tensor, pipeline, virtual, context and expert sizes,
micro-batches and recomputation, and lists the fastest layouts that fit. The vocabulary comes from
the tokenizer, or from ``--padded-vocab-size``; the lengths of videos come from their data, which is
opened. Exit code 0: it fits; 1: it does not; 2: the flags have errors.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

import pretrain_video
from megatron_ext.config.flags import COUNT, SIZE
from megatron_ext.config.parser import parse_args
from megatron_ext.config.reporting import GPU_NAMES
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.planning.checks import check_core
from megatron_ext.planning.hardware import Gpu, gpu_named
from megatron_ext.planning.picture import save
from megatron_ext.planning.report import console, search_table, show
from megatron_ext.planning.search import search
from megatron_ext.train.main import silence_known_warnings
from megatron_ext.train.preflight import preflight, with_vocabulary
from megatron_ext.video.cost.clip import Clip


def main(argv: Sequence[str]) -> int:
    """Print the plan; returns the exit code."""
    own = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    words = list(argv[len(own) + 1 :])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=SIZE.integer, required=True, metavar="N", help="GPUs")
    parser.add_argument(
        "--gpu", default="H100", help=f"their kind: {', '.join(GPU_NAMES)}, or a file .json (H100)"
    )
    parser.add_argument("--search", action="store_true", help="propose layouts")
    parser.add_argument("--video", action="store_true", help="the flags are of pretrain_video.py")
    parser.add_argument(
        "--count", type=COUNT.integer, default=10, metavar="N", help="of --search (10)"
    )
    parser.add_argument("--png", type=Path, help="draw the schedule, and the memory beside it")
    args = parser.parse_args(own)
    silence_known_warnings("cpu")
    try:
        gpu = gpu_named(args.gpu)
        if args.video:
            refuse_for_video(args)
            return plan(*read_video(words, args.world_size, args.gpu), gpu, args.png)
        config = read(words, 1 if args.search else args.world_size, args.gpu)
        if args.search:
            return propose(config, args.world_size, gpu, args.count)
        return plan(config, (), gpu, args.png)
    except MegatronExtError as error:
        print("\n".join(f"error: {text}" for text in error.messages), file=sys.stderr)
        return 2


def read(words: Sequence[str], world_size: int, gpu: str) -> RunConfig:
    """The run that flags describe, for GPUs of a kind.

    Raises:
        ConfigError: with one sentence for every error.
    """
    parsed = parse_args(words, world_size=world_size, device="cuda", defaults=planned_for(gpu))
    for note in parsed.notes:
        print(f"> {note}")
    return with_vocabulary(parsed.config)


def planned_for(gpu: str) -> dict[str, Any]:
    """What makes flags those of a plan, which may ask for what this machine lacks."""
    return {"dry_run": True, "dry_run_gpu": gpu}


def read_video(words: Sequence[str], world_size: int, gpu: str) -> tuple[RunConfig, Sequence[Clip]]:
    """A video run on GPUs, and the buckets of its data; none with ``--task streaming``.

    Raises:
        ConfigError, DataError: with one sentence for every error.
    """
    defaults = {**pretrain_video.defaults_of(words), **planned_for(gpu)}
    parsed = parse_args(words, world_size=world_size, device="cuda", defaults=defaults)
    for note in parsed.notes:
        print(f"> {note}")
    task = pretrain_video.task_of(parsed.config)
    config, _ = preflight(parsed.config, task.preflight)
    return config, () if task.clips is None else task.clips(config)


def refuse_for_video(args: argparse.Namespace) -> None:
    """What is there for text alone.

    Raises:
        ConfigError: with one sentence for each of the flags.
    """
    given = {"search": args.search, "png": args.png is not None}
    found = [
        f"`--{name}` is there for text models alone; leave it out with `--video`."
        for name, asked in given.items()
        if asked
    ]
    if found:
        raise ConfigError(found)


def plan(config: RunConfig, clips: Sequence[Clip], gpu: Gpu, png: Path | None) -> int:
    """Print the plan and draw the pictures; returns the exit code."""
    check_core(config)
    fits = show(config, gpu, clips)
    if png is not None:
        print("wrote " + " and ".join(str(path) for path in save(config, png, gpu)))
    return 0 if fits else 1


def propose(config: RunConfig, world_size: int, gpu: Gpu, count: int) -> int:
    """Print the best layouts."""
    found = search(config, world_size, gpu, count=count)
    console().print(search_table(found))
    return 0 if found.best else 1


if __name__ == "__main__":
    run_program(main)
