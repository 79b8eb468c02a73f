"""A tiny streaming run: 4 chunks in a sequence, 4 tokens in a frame, a switch of prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ext.config.video_rules import STREAMING_DEFAULTS
from megatron_ext.training.setup import Run
from pretrain_video import task_of
from tests.training_runs import train_on_ranks, training_rows

FLAGS = (
    "--task streaming --generator-size tiny --no-zero-head --latent-size 4 4 --frame-block 3 "
    "--window-frames 6 --sink-frames 3 --chunk-frames 9 --min-new-frames 6 --max-new-frames 6 "
    "--sequence-lengths 27 --recache-frames 9 --generator-interval 2 --codec-spatial 2 "
    "--codec-channels 4 --text-length 8 --text-width 32 --micro-batch-size 1 --lr 1e-3 "
    "--critic-lr 2e-3 --ema-decay 0.8 --ema-start 2 --log-interval 1 --seed 7"
).split()
CHUNKS = 4


def write_prompts(folder: Path, *, switch: bool = True) -> list[str]:
    """Flags of two files of prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["prompts", "second_prompts"][: 1 + switch]
    words = []
    for name in names:
        path = folder / f"{name}.txt"
        path.write_text("".join(f"{name} a {i} disc\n" for i in range(5)))
        words += [f"--{name.replace('_', '-')}-path", str(path)]
    return words


def run(
    folder: Path,
    words: str,
    *,
    ranks: int = 1,
    batch: int = 1,
    save: str = "save",
    prepare: Callable[[Run], None] | None = None,
) -> list[dict[str, Any]]:
    """The rows of the training steps of a run, which must not fail."""
    flags = [*FLAGS, *write_prompts(folder), "--global-batch-size", str(batch), *words.split()]
    code, rows = train_on_ranks(
        flags,
        ranks=ranks,
        save=folder / save,
        task=task_of,
        defaults=STREAMING_DEFAULTS,
        prepare=prepare,
    )
    assert code == 0
    return training_rows(rows)
