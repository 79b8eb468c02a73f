"""Generates clips for the prompts of a run, on all of its ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.run import (
    FlowConfig,
    SampleConfig,
)
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.conditions import Text
from megatron_ext.video.data.randomness import draw_noise
from megatron_ext.video.networks.lookup import chosen
from megatron_ext.video.sampling.encoding import EncodedRequests
from megatron_ext.video.sampling.flow import ClipsInProgress
from megatron_ext.video.sampling.guidance import Guidance
from megatron_ext.video.sampling.solvers import Schedule, read_scheduler
from megatron_ext.video.sampling.velocity import ParallelVelocity

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext


@torch.no_grad()
def decoded(codec: VideoCodec, latents: Tensor, batch_size: int) -> Tensor:
    """Decode latents ``[P, c, t, h, w]``, ``batch_size`` clips at a time.

    Returns pixels ``[P, 3, f, H, W]`` on the CPU.
    """
    return torch.cat([codec.decode(part).cpu() for part in torch.split(latents, batch_size)])


def schedule_of(config: RunConfig, sampling: SampleConfig) -> Schedule:
    """Return the schedule of a group of clips whose flags of sampling are ``sampling``."""
    folder = sampling.sample_scheduler_folder
    settings = {} if folder is None else read_scheduler(Path(folder))
    even = chosen(config).even_times
    return Schedule(config.section(FlowConfig), sampling, settings, even=even)


class GroupSampler:
    """Samples the P requests of a group, divided among the replicas; all ranks use it together.

    A clip's noise does not depend on the parallel layout. A replica with one clip less than others
    also samples the last clip, and discards it. All replicas then call the model equally often,
    as a model whose experts lie on several replicas needs.

    Args:
        schedule: solver and times; its flags of sampling are those of this group.
        draws: (seed, number) of each request, the two numbers that determine its noise. None means
            ``--sample-seed`` and the request's index.
        boundary: time at which a second network takes over, if there are two.

    Raises:
        ConfigError: there are references, but the model takes none.
    """

    def __init__(
        self,
        velocity: ParallelVelocity,
        encoded: EncodedRequests,
        *,
        schedule: Schedule,
        context: ParallelContext,
        draws: Sequence[tuple[int, int]] | None = None,
        boundary: float | None = None,
    ) -> None:
        if encoded.references is not None and not velocity.takes_references:
            raise ConfigError(
                "A prompt has a reference, but the model was built without `cond_embed` and would "
                "ignore it; sample from a model of image to video, or leave the reference out."
            )
        sampling = schedule.sampling
        self._velocity = velocity
        self._encoded = encoded
        self._schedule = schedule
        self._context = context
        self._guidance = Guidance(sampling, boundary)
        self._draws = draws or [(sampling.sample_seed, i) for i in range(len(encoded))]
        replicas = context.layout.data_parallel_size
        total = len(encoded)
        rounds = -(-total // replicas)
        numbers = [min(i * replicas + context.dp_rank, total - 1) for i in range(rounds)]
        batch = sampling.sample_batch_size
        self._batches = [numbers[i : i + batch] for i in range(0, rounds, batch)]
        self._begun: list[ClipsInProgress] = []

    def advance(self, until: float) -> None:
        """Take the steps of all clips that begin at a time of at least ``until``."""
        self._begun = [self._begin(numbers) for numbers in self._batches]
        for clips in self._begun:
            self._advance(clips, until)

    def latents(self) -> Tensor | None:
        """Take all steps that are left, and return the clips' latents.

        Returns:
            ``[P, c, t, h, w]`` float32 on the model's device; None except on the reporting rank.

        Raises:
            DataError: the inputs do not fit the model.
        """
        finished = []
        for number, numbers in enumerate(self._batches):
            clips = self._begun[number] if self._begun else self._begin(numbers)
            self._advance(clips)
            keeps = self._velocity.keeps_references
            finished.append(clips.latents(keeps_references=keeps))
        self._begun = []
        own = torch.cat(finished)
        context = self._context
        parts = [torch.empty_like(own) for _ in range(context.layout.data_parallel_size)]
        torch.distributed.all_gather(parts, own.contiguous(), group=context.pgs.dp)
        if not context.is_reporting_rank:
            return None
        return torch.stack(parts, dim=1).flatten(0, 1)[: len(self._encoded)]

    def _advance(self, clips: ClipsInProgress, until: float = 0.0) -> None:
        clips.advance(self._velocity.of_shape(self._encoded.latent_shape[1:]), until)

    def _begin(self, numbers: list[int]) -> ClipsInProgress:
        """Return the noise of the requests with the indices ``numbers``, with their conditions."""
        device = self._velocity.device
        shape = self._encoded.latent_shape
        patch = self._velocity.patch_size
        text = self._encoded.text
        null = self._encoded.null
        given = self._encoded.references
        noise = torch.cat(
            [
                draw_noise(seed, [number], shape, purpose="sampling noise")
                for seed, number in (self._draws[i] for i in numbers)
            ]
        )
        own = slice(None) if len(null.sequence) == 1 else numbers
        return ClipsInProgress(
            Text(text.sequence[numbers].to(device), text.pooled[numbers].to(device)),
            Text(null.sequence[own].to(device), null.pooled[own].to(device)),
            noise.to(device),
            patch_size=patch,
            solver=self._schedule.solver(shape[1:], patch),
            guidance=self._guidance,
            references=None if given is None else given.map(lambda x: x[numbers]),
        )
