"""Generation of frame blocks: first without gradient, then their exit steps once more with it.

A block is denoised from noise up to its exit step, whose clean latents are the block (arXiv:
2506.08009), and which are then written into the cache for later blocks. Only the exit step is
trained, and past frames are constants to it. So the gradient of a loss on the latents can be had
before any backward pass: generate all blocks without gradient, then run each exit step again from
the input that was recorded. Peak memory is that of one block, and blocks are independent
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.losses.noise_schedule import NoiseSchedule, mixed
from megatron_ext.models.causal_video.conversions import x0_from_flow
from megatron_ext.streaming.network import CausalNetwork, FrameCache

BlockNoise = Callable[[int, int], Tensor]
"""Noise ``[b, block, c, h, w]`` of (first frame of a block, step); see `draws.block_noise`."""

WRITE_BACK = -1
"""The step of `BlockNoise` at which a block is written into the cache."""


@dataclass(frozen=True)
class ExitStep:
    """What the exit step of a block takes in.

    Attributes:
        x: noised latents, ``[b, block, c, h, w]``.
        timestep: of all its frames.
        text: ``[b, l, d]``.
        first_frame: absolute number of its first frame.
    """

    x: Tensor
    timestep: float
    text: Tensor
    first_frame: int


@dataclass(frozen=True)
class Generator:
    """The student and what belongs to it.

    Attributes:
        network: see `CausalNetwork`.
        cache: see `FrameCache`.
        schedule: of noise.
    """

    network: CausalNetwork
    cache: FrameCache
    schedule: NoiseSchedule

    def clean(self, step: ExitStep) -> Tensor:
        """Clean latents that a step predicts, ``[b, block, c, h, w]``.

        The cache is read, never written: later blocks must not see keys of noised frames. Run with
        gradient after generation, this is the second phase.
        """
        t = _timesteps(step.timestep, step.x)
        flow = self.network(
            x=step.x,
            timesteps=t,
            text=step.text,
            cache=self.cache,
            first_frame=step.first_frame,
            update_cache=False,
        )
        return x0_from_flow(step.x, flow, self.schedule.sigma(t))

    def generate(
        self, first_frame: int, text: Tensor, noise: BlockNoise, *, exit_step: int, graph: bool
    ) -> tuple[Tensor, ExitStep]:
        """A block, whose past is in the cache, and which is in the cache afterwards.

        Takes ``exit_step + 2`` forward passes.

        Args:
            first_frame: absolute number of its first frame.
            text: ``[b, l, d]``.
            noise: see `BlockNoise`.
            exit_step: denoising step whose clean latents are the block, counted from 0.
            graph: run the exit step with gradient.

        Returns:
            Clean latents ``[b, block, c, h, w]``, and the exit step.
        """
        timesteps = self.schedule.denoising_timesteps
        x = noise(first_frame, 0)
        with torch.no_grad():
            for step in range(exit_step):
                x0 = self.clean(ExitStep(x, timesteps[step], text, first_frame))
                fresh, t = noise(first_frame, step + 1), timesteps[step + 1]
                x = self.schedule.add_noise(x0, fresh, _timesteps(t, x0))
        last = ExitStep(x, timesteps[exit_step], text, first_frame)
        with torch.set_grad_enabled(graph):
            x0 = self.clean(last)
        self.write_back(x0.detach(), first_frame, text, noise)
        return x0, last

    def write_back(self, x0: Tensor, first_frame: int, text: Tensor, noise: BlockNoise) -> None:
        """Write clean frames into the cache, with the context noise; arguments as of `generate`."""
        sigma = self.schedule.context_sigma()
        if sigma:
            x0 = mixed(x0, noise(first_frame, WRITE_BACK), torch.tensor(sigma))
        with torch.no_grad():
            self.network(
                x=x0,
                timesteps=_timesteps(self.schedule.config.context_noise, x0),
                text=text,
                cache=self.cache,
                first_frame=first_frame,
            )

    def check_capacity(self, num_frames: int) -> None:
        """See to it that any block of so many new frames can be run again after the last.

        Raises:
            ConfigError: too small a cache, with the number that is needed.
        """
        window, given = self.cache.window, self.cache.capacity_frames
        needed = window.window + num_frames - window.block
        if given < needed:
            raise ConfigError(
                f"`capacity_frames` ({given}) must be {needed} or more to train chunks of "
                f"{num_frames} new frames, whose first block is run again when the last has been "
                f"written: window ({window.window}) + new frames - block ({window.block}); use "
                f"{needed}."
            )


def _timesteps(value: float, x: Tensor) -> Tensor:
    """One timestep for all frames, ``[b, t]`` float32."""
    return torch.full(x.shape[:2], value, dtype=torch.float32, device=x.device)
