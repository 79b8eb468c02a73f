"""Samples clips with a run's model: at intervals of training steps, or once without training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.disk.iterations import name_of
from megatron_ext.parallel.collectives import on_reporting_rank
from megatron_ext.schedules.forward import forward_engine
from megatron_ext.train.callbacks.callback import Callback, due
from megatron_ext.train.run import Run
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.networks.lookup import network_of
from megatron_ext.video.sampling.clips import write_clips
from megatron_ext.video.sampling.experts import load_low_noise_expert
from megatron_ext.video.sampling.generate import GroupSampler, decoded, schedule_of
from megatron_ext.video.sampling.prompts import EncodedPrompts, encode_prompts
from megatron_ext.video.sampling.velocity import ParallelVelocity


def velocity_of(run: Run) -> ParallelVelocity:
    """Return the velocity predictor of a run's model; all ranks call this together."""
    runner = run.runner
    engine = runner.engine or forward_engine(run.chunks, runner.transformer_config, run.context)
    return network_of(run.config).sampled(engine, run.chunks, run.context)


def report_average_start(run: Run) -> None:
    """Log which share of the averaged weights (EMA) is still the weights that they started from.

    Nothing is logged if the share is below 0.1% or unknown, or before the first update.
    """
    note = run.progress.average_note
    if note is not None:
        run.reporters.say(f"{note}; `--no-sample-ema` samples with the last weights")


def facts_of_weights(run: Run, *, averaged: bool) -> dict[str, Any]:
    """Return the fields of ``samples.jsonl`` on the weights: iteration, and whether averaged (EMA).

    If so, ``share_of_start`` is the share of the average that is still its first values.
    """
    facts = {"iteration": run.progress.iteration, "averaged_weights": averaged}
    return {**facts, "share_of_start": run.progress.average_start} if averaged else facts


def free(modules: Sequence[torch.nn.Module]) -> None:
    """Give back the memory of all parameters and buffers, which cannot be used afterwards.

    Whatever else refers to them, such as megatron-core's buffers, keeps no memory.
    """
    for module in unwrap_model(list(modules)):
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.untyped_storage().resize_(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class ClipSampler:
    """Samples clips for a run's prompts with the run's model; all ranks build and call it together.

    The prompts are encoded once for all calls; then the text encoder is freed.

    Args:
        prompts: the run's prompts, if they have been encoded already.
        frees_model: whether the model is not needed again, so that its memory is given back before
            clips are decoded.

    Raises:
        ConfigError, DataError: prompts, references or encoders are unusable (raised on all ranks).
    """

    def __init__(
        self, run: Run, prompts: EncodedPrompts | None = None, *, frees_model: bool = False
    ) -> None:
        self._run = run
        self._frees_model = frees_model
        self._sample = run.config.section(SampleConfig)
        self._prompts = prompts or encode_prompts(run.config, run.context)
        self._velocity = velocity_of(run)

    def _latents(self) -> list[Tensor | None]:
        """Return the latents of each group of clips on the reporting rank, None on others."""
        run = self._run
        prompts = self._prompts
        expert = self._sample.sample_low_noise_expert
        boundary = None if expert is None else self._sample.sample_boundary
        groups = [
            GroupSampler(
                self._velocity,
                encoded,
                schedule=schedule_of(run.config, group.sampling),
                context=run.context,
                draws=group.draws,
                boundary=boundary,
            )
            for group, encoded in zip(prompts.groups, prompts.encoded, strict=True)
        ]
        if boundary is not None:
            for group in groups:
                group.advance(boundary)
            run.reporters.say(load_low_noise_expert(run))
        return [group.latents() for group in groups]

    def __call__(self, folder: Path) -> None:
        """Sample the clips and write them into a folder.

        If any pixel is not finite, nothing is written, and the log says so. Averaged weights are
        used if the run has them and ``--sample-ema`` is on. MegatronExtError is raised on all ranks
        if the files cannot be written.
        """
        run = self._run
        sample = self._sample
        prompts = self._prompts
        ema = run.ema if sample.sample_ema else None
        if ema is not None:
            report_average_start(run)
        with run.parameter_gather.paused(), ema.swapped_in(run.chunks) if ema else nullcontext():
            latents = self._latents()
        facts = {
            **facts_of_weights(run, averaged=ema is not None),
            "steps": sample.sample_steps,
        }
        if self._frees_model:
            free(run.chunks)
        codec = prompts.codec()

        def write() -> None:
            assert codec is not None
            clips = dict[int, Tensor]()
            for group, made in zip(prompts.groups, latents, strict=True):
                assert made is not None
                pixels = decoded(codec, made, sample.sample_batch_size)
                clips |= zip(group.numbers, pixels, strict=True)
            if not all(bool(pixels.isfinite().all()) for pixels in clips.values()):
                run.reporters.say("the sampled clips are not finite and are not written")
                return
            ordered = [clips[number] for number in range(len(clips))]
            fps = prompts.shape.fps
            seed = sample.sample_seed
            write_clips(folder, ordered, prompts.requests, fps=fps, seed=seed, facts=facts)
            run.reporters.say(f"sampled {len(prompts.requests)} clips into {folder}")

        on_reporting_rank(write, f"Writing clips into {folder}", run.context)


class SampleWhileTraining(Callback):
    """A callback that samples clips every ``--sample-interval`` steps, into a new folder each time.

    ``build(run)`` is called once, and returns a function that samples clips into a given folder.
    The folders are ``iter_0000100`` and so on in ``--sample-dir`` (default: ``samples`` in
    ``--save``).
    """

    @classmethod
    def of_run(
        cls, run: Run, build: Callable[[Run], Callable[[Path], None]]
    ) -> SampleWhileTraining | None:
        """Return the callback with ``run`` and ``build``, or None without ``--sample-interval``."""
        interval = run.config.section(SampleConfig).sample_interval
        return None if interval is None else cls(run, build)

    def __init__(self, run: Run, build: Callable[[Run], Callable[[Path], None]]) -> None:
        super().__init__(run)
        sample = run.config.section(SampleConfig)
        self._interval = sample.sample_interval
        self._sample = build(run)
        self._root = Path(sample.sample_dir or Path(run.config.checkpoint.save or ".") / "samples")

    def after_step(self) -> None:
        iteration = self.run.progress.iteration
        if due(iteration, self._interval):
            self._sample(self._root / name_of(iteration))
