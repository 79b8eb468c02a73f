"""What pretrain_video.py --task streaming trains.

Long videos that a streaming run samples now and then, without any effect on its training.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.data.loader import BatchSource
from megatron_ext.train.batch_size import StepStats
from megatron_ext.train.callbacks.callback import Callback, due
from megatron_ext.train.run import Run
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


class SampleWhileTraining(Callback):
    """Samples long videos after each multiple of ``--sample-interval``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        sample = run.config.sample
        self._interval = sample.sample_interval
        self._root = Path(sample.sample_dir or Path(run.config.checkpoint.save or ".") / "samples")
        if self._interval is None:
            return
        assert isinstance(run.runner, StreamingRunner)
        self._work = run.runner.work
        prompts = run.runner.sequence.prompts
        assert isinstance(prompts, FilePrompts)
        self._maker = FilmMaker(
            run,
            prompts.encode,
            # A VAE is large; the one that encodes first frames will do.
            lambda: prompts.codec or build_codec(run.config.codec, run.device),
        )

    def after_step(self) -> None:
        """Sample where the interval says so."""
        iteration = self.run.progress.iteration
        if due(iteration, self._interval):
            with self._work.paused():
                _view(self.run, self._maker, self._root / f"iter_{iteration:07}")


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
    chunks = len(passes(runner.options, runner.extra_state.steps, num_microbatches))
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
    callbacks=(SampleWhileTraining,),
    sample_name="chunks",
    perplexity=False,
    preflight=prepare_streaming,
    step_runner=StreamingRunner,
)
