"""Long videos that a streaming run samples now and then, without any effect on its training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.data.video.codecs import build_codec
from megatron_ext.sampling.films import NotFiniteError
from megatron_ext.training.streaming.films import FilmMaker
from megatron_ext.training.streaming.prompts import FilePrompts
from megatron_ext.training.streaming.step import StreamingRunner

if TYPE_CHECKING:
    from megatron_ext.training.setup import Run


def view_while_training(run: Run) -> Callable[[], None] | None:
    """Sample after each multiple of ``--sample-interval``; see `Task.after_step`."""
    sample, runner = run.config.sample, run.runner
    if sample.sample_interval is None:
        return None
    assert isinstance(runner, StreamingRunner)
    prompts = runner.sequence.prompts
    assert isinstance(prompts, FilePrompts)
    maker = FilmMaker(
        run,
        prompts.encode,
        # A VAE is large; that of the first frames will do.
        lambda: prompts.codec or build_codec(run.config.codec, run.device),
    )
    interval = sample.sample_interval
    root = Path(sample.sample_dir or Path(run.config.checkpoint.save or ".") / "samples")

    def after_step() -> None:
        if run.progress.iteration % interval == 0:
            with runner.work.paused():
                _view(run, maker, root / f"iter_{run.progress.iteration:07}")

    return after_step


def _view(run: Run, maker: FilmMaker, folder: Path) -> None:
    """Sample once.

    Raises:
        MegatronExtError: on all ranks, where the files cannot be written.
    """
    try:
        pace = maker(folder)
    except NotFiniteError:
        run.reporters.say("the sampled videos are not finite and are not written")
        return
    run.reporters.say(f"sampled {pace.videos} videos into {folder} in {pace.seconds:.1f} s")
