"""The task of ``pretrain_video.py --task streaming``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ext.data.loader import BatchSource
from megatron_ext.train.batch_size import StepStats
from megatron_ext.train.callbacks.callback import Callback, due
from megatron_ext.train.run import Run
from megatron_ext.train.task import Task, no_datasets
from megatron_ext.video.config.encoding import CodecConfig
from megatron_ext.video.config.rules import (
    LEFT_OUT,
    SECTIONS,
    STREAMING_DEFAULTS,
    resolve_streaming,
    streaming_rules,
)
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.config.stored import stored_video_model
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.streaming.cost import STREAMING_COST
from megatron_ext.video.streaming.decisions import passes
from megatron_ext.video.streaming.long_videos import LongVideoSampler
from megatron_ext.video.streaming.networks import build_generator_chunk
from megatron_ext.video.streaming.prompts import FilePrompts
from megatron_ext.video.streaming.rules import clip_tokens, prepare_streaming
from megatron_ext.video.streaming.step import StreamingRunner
from megatron_ext.video.streaming.video_files import NotFiniteError


class SampleWhileTraining(Callback):
    """Samples long videos after each multiple of ``--sample-interval``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        sample = run.config.section(SampleConfig)
        self._interval = sample.sample_interval
        self._root = Path(sample.sample_dir or Path(run.config.checkpoint.save or ".") / "samples")
        if self._interval is None:
            return
        assert isinstance(run.runner, StreamingRunner)
        self._work = run.runner.work
        prompts = run.runner.sequence.prompts
        assert isinstance(prompts, FilePrompts)
        self._sampler = LongVideoSampler(
            run,
            prompts.encode,
            # A VAE is large, so the one that encodes first frames is used again.
            lambda: prompts.codec or build_codec(run.config.section(CodecConfig), run.device),
        )

    def after_step(self) -> None:
        """Sample after each multiple of the interval."""
        iteration = self.run.progress.iteration
        if due(iteration, self._interval):
            with self._work.paused():
                _sample(self.run, self._sampler, self._root / f"iter_{iteration:07}")


def _sample(run: Run, sampler: LongVideoSampler, folder: Path) -> None:
    """Sample the videos once.

    Raises:
        MegatronExtError: on all ranks, where the files cannot be written.
    """
    try:
        seen = sampler(folder)
    except NotFiniteError:
        run.reporters.say("the sampled videos are not finite and are not written")
        return
    run.reporters.say(f"sampled {seen.videos} videos into {folder} in {seen.seconds:.1f} s")


def no_batches(
    run: Run, dataset: Any, assets: None, consumed_samples: int, full_epoch: bool
) -> BatchSource:
    """Return a source without batches, since prompts belong to the sequence; see `Task.source`."""
    return BatchSource(None, None)


def streaming_step_stats(run: Run, num_microbatches: int) -> StepStats:
    """Count samples and tokens of a step; see `Task.step_stats`. The runner counts operations."""
    runner = run.runner
    assert isinstance(runner, StreamingRunner)
    clips = len(passes(runner.streaming, runner.extra_state.steps, num_microbatches))
    return StepStats(
        samples=run.rows_of(num_microbatches),
        tokens=run.rows_of(1) * clips * clip_tokens(runner.streaming),
        flops=0.0,
    )


STREAMING = Task(
    sections=SECTIONS,
    left_out=LEFT_OUT,
    defaults=STREAMING_DEFAULTS,
    resolve=resolve_streaming,
    rules=streaming_rules,
    stored_model=stored_video_model,
    datasets=no_datasets,
    model_chunk=build_generator_chunk,
    source=no_batches,
    step_stats=streaming_step_stats,
    callbacks=(SampleWhileTraining,),
    sample_name="chunks",
    preflight=prepare_streaming,
    step_runner=StreamingRunner,
    cost=STREAMING_COST,
)
