"""The parts of `STREAMING` around its steps: counts of a step, and the videos it samples.

The task in `video.streaming.task` names these functions, and they are imported when a run starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.data.loader import BatchSource
from megatron_ext.train.batch_size import StepStats
from megatron_ext.train.run import Run
from megatron_ext.video.config.encoding import CodecConfig
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.sampling.samples import SampleWhileTraining
from megatron_ext.video.streaming.decisions import passes
from megatron_ext.video.streaming.long_videos import LongVideoSampler, NotFiniteError
from megatron_ext.video.streaming.prepare import clip_tokens
from megatron_ext.video.streaming.prompts import FilePrompts
from megatron_ext.video.streaming.step import StreamingRunner


def sampler_of(run: Run) -> Callable[[Path], None]:
    """Return a function that samples long videos into a given folder with the run's generator.

    Training calls the function between steps.
    """
    runner = run.runner
    assert isinstance(runner, StreamingRunner)
    prompts = runner.sequence.prompts
    work = runner.work
    assert isinstance(prompts, FilePrompts)
    # A VAE is large, so reuse the one that encodes first frames.
    codec = partial(build_codec, run.config.section(CodecConfig), run.device)
    sampler = LongVideoSampler(run, prompts.encode, lambda: prompts.codec or codec())

    def sample(folder: Path) -> None:
        try:
            with work.paused():
                seen = sampler(folder)
        except NotFiniteError:
            run.reporters.say("the sampled videos are not finite and are not written")
            return
        run.reporters.say(f"sampled {seen.videos} videos into {folder} in {seen.seconds:.1f} s")

    return sample


def no_batches(
    run: Run, dataset: Any, assets: None, consumed_samples: int, full_epoch: bool
) -> BatchSource:
    """Return a source without batches, since a streaming run takes prompts from its sequence.

    All arguments are ignored.
    """
    return BatchSource(None, None)


def streaming_step_stats(run: Run, num_microbatches: int) -> StepStats:
    """Return the numbers of samples and tokens of the next step.

    The number of floating-point operations is 0 here, since the runner counts them.
    """
    runner = run.runner
    assert isinstance(runner, StreamingRunner)
    clips = len(passes(runner.streaming, runner.extra_state.steps, num_microbatches))
    return StepStats(
        samples=num_microbatches * run.batch_size.samples_per_microbatch,
        tokens=run.batch_size.samples_per_microbatch * clips * clip_tokens(runner.streaming),
        flops=0.0,
    )


def long_video_samples(run: Run) -> SampleWhileTraining | None:
    """Return the callback that samples long videos, or None without ``--sample-interval``."""
    return SampleWhileTraining.of_run(run, sampler_of)
