"""A tiny streaming run: 4 clips in a sequence, 4 tokens in a frame, a switch of prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.train.run import Run
from megatron_ext.video.streaming.rollout import StreamClip
from megatron_ext.video.streaming.step import StreamingRunner
from megatron_ext.video.task import VIDEO
from tests.training_runs import train_on_ranks, training_rows

Rows = list[dict[str, Any]]

FLAGS = (
    "--task streaming --generator-size tiny --no-zero-head --latent-size 4 4 --frame-block 3 "
    "--window-frames 6 --sink-frames 3 --chunk-frames 9 --min-new-frames 6 --max-new-frames 6 "
    "--sequence-lengths 27 --recache-frames 9 --generator-interval 2 --micro-batch-size 1 "
    "--text-length 8 --text-width 32 --lr 1e-3 --critic-lr 2e-3 --ema-decay 0.8 --log-interval 1 "
    "--seed 7 --codec-spatial 2 --codec-channels 4"
).split()
CLIPS = 4
"""Number of chunks of a sequence; they end at frames 9, 15, 21 and 27."""


def write_prompts(folder: Path, *, switch: bool = True) -> list[str]:
    """Write two files of prompts, and return their flags."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["prompts", "second_prompts"][: 1 + switch]
    words = []
    for name in names:
        path = folder / f"{name}.txt"
        path.write_text("".join(f"{name} a {i} disc\n" for i in range(5)))
        words += [f"--{name.replace('_', '-')}-path", str(path)]
    return words


def flags_of(
    folder: Path, words: str, *, micro: int = 1, batch: int = 1, interval: int = 2, start: int = 2
) -> list[str]:
    """Return the words of a command line."""
    own = (
        f"--micro-batch-size {micro} --global-batch-size {batch} --generator-interval {interval} "
        f"--ema-start {start} {words}"
    )
    prompts = [] if "--prompts-path" in words else write_prompts(folder)
    # Nothing looks at the codec without first frames, and its flags, the last four, are refused.
    usual = FLAGS[:-4] if "--no-encode-first-frame" in words else FLAGS
    return [*usual, *prompts, *own.split()]


def attempt(
    folder: Path,
    words: str,
    *,
    ranks: int = 1,
    save: str = "save",
    prepare: Callable[[Run], None] | None = None,
    **sizes: int,
) -> tuple[int, Rows]:
    """Return the exit code of a run, and the rows of its training steps."""
    code, rows = train_on_ranks(
        flags_of(folder, words, **sizes),
        ranks=ranks,
        save=folder / save,
        task=VIDEO,
        prepare=prepare,
    )
    return code, training_rows(rows)


def run(folder: Path, words: str, **options: Any) -> Rows:
    """Return the rows of the training steps of a run, which must not fail; see `attempt`."""
    code, rows = attempt(folder, words, **options)
    assert code == 0
    return rows


def runner_of(run: Run) -> StreamingRunner:
    """Return the streaming runner of a run."""
    assert isinstance(run.runner, StreamingRunner)
    return run.runner


def after_each_step(run: Run, do: Callable[[Any], None]) -> None:
    """Call a function with the result of each step of a run, after it."""
    train = run.runner.train

    def wrapped(*args: Any) -> Any:
        result = train(*args)
        do(result)
        return result

    run.runner.train = wrapped  # type: ignore[method-assign]


def on_each_clip(run: Run, do: Callable[[StreamClip, bool], None]) -> None:
    """Call a function with each clip of a run, and with whether it trains the generator."""
    sequence = runner_of(run).sequence
    next_clip = sequence.next_clip

    def wrapped(*, trains_generator: bool) -> StreamClip:
        clip = next_clip(trains_generator=trains_generator)
        do(clip, trains_generator)
        return clip

    sequence.next_clip = wrapped  # type: ignore[method-assign]


def weights(module: Any) -> dict[str, Tensor]:
    """Return copies of the parameters of a network that this rank holds."""
    (bare,) = unwrap_model([module])
    return {name: p.detach().clone() for name, p in bare.named_parameters()}


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return whether any of the parameters has changed."""
    return any(not torch.equal(tensor, b[name]) for name, tensor in a.items())


def losses_of(row: dict[str, Any]) -> dict[str, float]:
    """Return the losses and norms that a step logs for both networks."""
    words = ("loss", "norm")
    return {k: v for k, v in row.items() if any(w in k for w in words) and k != "loss_scale"}
