"""What pretrain_video.py --task streaming trains.

Long videos that a streaming run samples now and then, without any effect on its training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.data.loader import BatchSource
from megatron_ext.train.metrics import StepStats
from megatron_ext.train.task import Task, no_datasets
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.sampling.films import NotFiniteError
from megatron_ext.video.streaming.configuration import chunk_tokens, prepare_streaming
from megatron_ext.video.streaming.films import FilmMaker
from megatron_ext.video.streaming.networks import build_generator_chunk
from megatron_ext.video.streaming.options import passes
from megatron_ext.video.streaming.prompts import FilePrompts
from megatron_ext.video.streaming.step import StreamingRunner

if TYPE_CHECKING:
    from megatron_ext.text.tokenizers.base import Tokenizer
    from megatron_ext.train.run import Run


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


def no_batches(
    run: Run, dataset: Any, tokenizer: Tokenizer, consumed_samples: int, full_epoch: bool
) -> BatchSource:
    """See `Task.source`."""
    return BatchSource(None, None)


def streaming_step_stats(run: Run, num_microbatches: int) -> StepStats:
    """Chunks' samples and tokens; see `Task.step_stats`. The runner counts the operations."""
    runner = run.runner
    assert isinstance(runner, StreamingRunner)
    chunks = len(passes(runner.options, runner.companion.steps, num_microbatches))
    rows = run.rows_of(1) * chunks
    return StepStats(
        samples=run.rows_of(num_microbatches),
        tokens=rows * chunk_tokens(run.config.streaming),
        flops=0.0,
    )


STREAMING = Task(
    datasets=no_datasets,
    model_chunk=build_generator_chunk,
    source=no_batches,
    step_stats=streaming_step_stats,
    after_step=view_while_training,
    sample_name="chunks",
    perplexity=False,
    preflight=prepare_streaming,
    step_runner=StreamingRunner,
)
