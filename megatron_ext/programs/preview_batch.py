"""Shows the batches of a run before it starts: what is trained, token by token or clip by clip.

Takes the flags of pretrain_gpt.py or pretrain_video.py, and reads the batches with the trainer's
own code, in one process and without a model. In a launch script, it can replace the program:

    python tools/preview_batch.py --steps 2 --html batch.html -- <flags of the program>

The greener a token, the larger its weight in the loss. Totals are over all data-parallel ranks.
Exit code 0: shown; 1: there is a warning, with --strict; 2: an error that would also end the run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_ext.config.flags import COUNT, NATURAL
from megatron_ext.config.tool_options import own_options
from megatron_ext.errors import ConfigError, MegatronExtError, tell_errors
from megatron_ext.text.task import TEXT
from megatron_ext.train.task import later

# Imported when they are called, so that help and a wrong option need no torch.
Options = later("megatron_ext.inspect.preview.main:Options")
preview = later("megatron_ext.inspect.preview.main:preview")
preview_videos = later("megatron_ext.inspect.preview.videos:preview_videos")

_VIDEO_FLAG = "--video-data-path"
"""The flag that tells the flags of pretrain_video.py, which needs it, from those of
pretrain_gpt.py."""


def main(argv: Sequence[str]) -> int:
    """Show batches of a run with the given flags; return the exit code."""
    if int(os.environ.get("RANK", "0")):
        return 0  # A launcher starts many processes, but one can show all batches.
    args, words = split(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console(
        no_color=True if args.no_color else None,
        width=None if sys.stdout.isatty() else 120,
        highlight=False,
    )
    options = Options(
        step=args.step,
        steps=args.steps,
        rank=args.rank,
        max_rows=args.max_rows,
        world_size=args.world_size,
        html=args.html,
        codec=args.codec,
    )
    try:
        if any(word.replace("_", "-").startswith(_VIDEO_FLAG) for word in words):
            warnings = preview_videos(words, options, console)
        elif args.codec is not None:
            raise ConfigError.about(
                "--codec",
                args.codec,
                "has an effect only with the flags of pretrain_video.py",
                "leave it out",
            )
        else:
            warnings = preview(TEXT, words, options, console)
    except MegatronExtError as error:
        tell_errors(error.messages)
        return 2
    return int(args.strict and bool(warnings))


def split(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the tool's own options, and the flags of the run; without ``--`` all are the run's."""
    if not argv:
        argv = ["--help"]
    elif "--" not in argv and argv[0] not in ("-h", "--help"):
        argv = ["--", *argv]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step", type=COUNT.integer, default=1, help="the first step to show (1)")
    parser.add_argument("--steps", type=COUNT.integer, default=1, help="number of steps (1)")
    parser.add_argument(
        "--rank", type=NATURAL.integer, default=0, help="data-parallel rank to show (0)"
    )
    parser.add_argument(
        "--max-rows", type=COUNT.integer, default=4, help="rows or clips to show of a step (4)"
    )
    parser.add_argument(
        "--world-size",
        type=NATURAL.integer,
        default=0,
        help="ranks of the run, where torchrun starts them (WORLD_SIZE, else --nproc-per-node)",
    )
    parser.add_argument("--html", type=Path, help="also write a page for a browser")
    parser.add_argument("--codec", help="folder of the VAE that decodes the latents of clips")
    parser.add_argument("--no-color", action="store_true", help="mark what is trained with ⟦ ⟧")
    parser.add_argument(
        "--strict", action="store_true", help="exit code 1 where there is a warning"
    )
    return own_options(parser, argv)
