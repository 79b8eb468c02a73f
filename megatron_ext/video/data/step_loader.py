"""The clips of a video run, step by step, as micro-batches of this rank.

The first tensor-parallel rank reads the clips of a micro-batch, for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from megatron_ext.data.loader import BatchSource
from megatron_ext.device.streams import to_device
from megatron_ext.errors import loader_ends_with_parent
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.batch_size import StepStats
from megatron_ext.train.run import Run
from megatron_ext.video.data.conditions import Text
from megatron_ext.video.data.dataset import VideoBatch, VideoClips, collate
from megatron_ext.video.data.sampler import VideoPlan
from megatron_ext.video.data.setup import VideoSplit
from megatron_ext.video.networks import network_of
from megatron_ext.video.step import FlowMicrobatch


class _ClipsOfSteps(Sampler[list[int]]):
    """Clip numbers of the micro-batches of a data-parallel rank, from a step on; never ends."""

    def __init__(self, plan: VideoPlan, dp_rank: int, first_step: int) -> None:
        self._plan, self._dp_rank, self._step = plan, dp_rank, first_step

    def __iter__(self) -> Iterator[list[int]]:
        step = self._step
        while True:
            for planned in self._plan.microbatches(step, self._dp_rank, 0):
                yield planned.clips
            step += 1


class VideoLoader:
    """Gives the micro-batches of a data-parallel rank in order.

    Args:
        patch: latent cells of a token on each side.
        multiple: what the length of a sequence must be a multiple of.
        num_workers: processes that read.
        first_step: step of the plan with which to begin.
    """

    def __init__(
        self,
        clips: VideoClips,
        plan: VideoPlan,
        context: ParallelContext,
        device: torch.device,
        *,
        patch: int,
        multiple: int,
        num_workers: int,
        first_step: int,
    ) -> None:
        self._context, self._device = context, device
        self._batches: Iterator[VideoBatch] | None = None
        text, pooled = clips.null_text
        self.null = Text(text[None].to(device), pooled[None].to(device))
        if context.tp_rank == 0:
            loader: Any = DataLoader(
                clips,  # type: ignore[arg-type]
                batch_sampler=_ClipsOfSteps(plan, context.dp_rank, first_step),
                num_workers=num_workers,
                collate_fn=partial(collate, patch=patch, multiple=multiple),
                pin_memory=device.type == "cuda",
                # The loader would draw its seed from the generator that ranks share.
                generator=torch.Generator().manual_seed(0),
                multiprocessing_context="fork" if num_workers else None,
                worker_init_fn=loader_ends_with_parent(),
            )
            self._batches = iter(loader)

    def next(self) -> VideoBatch:
        """Return the next micro-batch, on the device of every tensor-parallel rank."""
        batch = None if self._batches is None else next(self._batches)
        group = self._context.pgs.tp
        if group.size() == 1:
            assert batch is not None
            own = {
                name: to_device(tensor, self._device) for name, tensor in batch.tensors().items()
            }
            return VideoBatch.from_tensors(own)
        return _received(batch, self._device, group)


def _received(batch: VideoBatch | None, device: torch.device, group: Any) -> VideoBatch:
    """Return a batch as the first rank of the group has it."""
    about: list[Any] = [None]
    tensors = {} if batch is None else batch.tensors()
    if batch is not None:
        about = [{name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}]
    # Ahead of the tensors, since clips differ in size, and short ones have fewer references.
    torch.distributed.broadcast_object_list(about, group=group, group_src=0)
    got = {}
    for name, (shape, dtype) in about[0].items():
        if batch is not None:
            got[name] = to_device(tensors[name], device).contiguous()
        else:
            got[name] = torch.empty(shape, dtype=dtype, device=device)
        torch.distributed.broadcast(got[name], group=group, group_src=0)
    return VideoBatch.from_tensors(got)


EVALUATION_SEED = 1 << 32
"""Added to the seed, so that validation clips never share their noise with training clips."""


class VideoSource(BatchSource):
    """The steps of one split on this rank, from a step on.

    Args:
        first_step: step of the plan with which to begin.
        consumed_samples: clips of all steps before, by which random decisions are numbered.
        training: draw anew in each pass; else every pass makes the same decisions about a clip.
    """

    def __init__(
        self,
        run: Run,
        split: VideoSplit,
        *,
        first_step: int,
        consumed_samples: int,
        training: bool,
    ) -> None:
        self.video_plan = split.plan
        super().__init__(None, len(split.clips), split.plan, first_step)  # type: ignore[arg-type]
        self._dp_rank, self._training = run.context.dp_rank, training
        self._consumed = consumed_samples
        config, network = run.config, network_of(run.config)
        patch = network.patch_size(config)
        self._clips = VideoLoader(
            split.clips,
            split.plan,
            run.context,
            run.device,
            patch=patch,
            multiple=network.sequence_multiple(config),
            num_workers=config.training.num_workers,
            first_step=first_step,
        )
        seed = config.training.seed + (0 if training else EVALUATION_SEED)
        self._build = network.builder(config, run.context, self._clips.null, seed, patch)

    @property
    def coming(self) -> int:
        """Return the step that comes next, counted from the beginning of the run."""
        return self._coming

    def next_step(self, num_microbatches: int) -> list[FlowMicrobatch]:
        """Return the micro-batches of the next step."""
        planned = self.video_plan.microbatches(self._coming, self._dp_rank, self._consumed)
        self._consumed += self.video_plan.num_samples(self._coming)
        self._coming += 1
        return [
            self._build(self._clips.next(), batch.samples if self._training else batch.clips)
            for batch in planned
        ]


def video_source(
    run: Run, dataset: Any, assets: None, consumed_samples: int, full_epoch: bool
) -> VideoSource:
    """Begin at the run's step, or anew with the same noise for validation; see `Task.source`."""
    return VideoSource(
        run,
        dataset,
        first_step=0 if full_epoch else run.progress.iteration,
        consumed_samples=consumed_samples,
        training=not full_epoch,
    )


def video_step_stats(run: Run, num_microbatches: int) -> StepStats:
    """Return clips, tokens and operations of the coming step; see `Task.step_stats`."""
    source = run.train_source
    assert isinstance(source, VideoSource)
    sequences = source.video_plan.sequences(source.coming)
    return StepStats(
        samples=len(sequences),
        tokens=sum(sequence.num_tokens for sequence in sequences),
        flops=sum(network_of(run.config).flops(run.config, x) for x in sequences),
    )
