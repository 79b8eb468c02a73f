"""Generate frame blocks without gradient, then run their exit steps once more with it.

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
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.loss import x0_from_flow
from megatron_ext.video.model.wan.cache import KVCache
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule, mixed


class FlowNetwork(Protocol):
    """A critic or teacher, which predicts the flow, noise - x0, of noised latents."""

    def __call__(self, *, x: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """Return the flow of ``x``.

        Args:
            x: noised latents, ``[b, t, c, h, w]``.
            timesteps: one for each sample ``[b]`` or each frame ``[b, t]``, float32, 0 to 1000.
            text: embeddings of prompts, ``[b, l, d]``.
        """


class CausalNetwork(Protocol):
    """A generator: a flow network that sees past frames through a cache."""

    def __call__(
        self,
        *,
        x: Tensor,
        timesteps: Tensor,
        text: Tensor,
        cache: Any = None,
        first_frame: int = 0,
        update_cache: bool = True,
    ) -> Tensor:
        """Return the flow of whole blocks of frames; see also `FlowNetwork`.

        Args:
            x: noised latents, ``[b, t, c, h, w]``.
            timesteps: one for each frame, ``[b, t]``.
            text: embeddings of prompts, ``[b, l, d]``.
            cache: keys and values of the frames before.
            first_frame: absolute number of the first of the t frames.
            update_cache: write these frames into the cache.
        """


Recache = Callable[..., None]
"""Fills a cache anew under another prompt, as `video.model.wan.recache.recache` does."""

BlockNoise = Callable[[int, int], Tensor]
"""Noise ``[b, block, c, h, w]`` of (first frame of a block, step); see `decisions.block_noise`."""

WRITE_BACK = -1
"""The step of `BlockNoise` at which a block is written into the cache."""


@dataclass(frozen=True)
class ExitStep:
    """The inputs of a block's exit step.

    Attributes:
        x: noised latents, ``[b, block, c, h, w]``.
        timestep: the same for all its frames.
        text: ``[b, l, d]``.
        first_frame: absolute number of the block's first frame.
    """

    x: Tensor
    timestep: float
    text: Tensor
    first_frame: int


@dataclass(frozen=True)
class Generator:
    """The trained network with its cache and its noise schedule."""

    network: CausalNetwork
    cache: KVCache
    schedule: NoiseSchedule

    def clean(self, step: ExitStep) -> Tensor:
        """Return the clean latents that a step predicts, ``[b, block, c, h, w]``.

        The cache is read, never written: later blocks must not see keys of noised frames. The
        second phase of training calls this with gradient, after generation.
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
        """Generate a block from the past in the cache, and write it into the cache.

        This takes ``exit_step + 2`` forward passes.

        Args:
            first_frame: absolute number of the block's first frame.
            text: ``[b, l, d]``.
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
        """Write clean frames into the cache, with the context noise; see `generate`."""
        sigma = self.schedule.context_sigma()
        if sigma:
            x0 = mixed(x0, noise(first_frame, WRITE_BACK), torch.tensor(sigma))
        with torch.no_grad():
            self.network(
                x=x0,
                timesteps=_timesteps(self.schedule.streaming.context_noise, x0),
                text=text,
                cache=self.cache,
                first_frame=first_frame,
            )

    def check_capacity(self, num_frames: int) -> None:
        """Check that any block of so many new frames can be run again after the last.

        Raises:
            ConfigError: the cache is too small; the message has the number that is needed.
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
    """Return one timestep for all frames, ``[b, t]`` float32."""
    return torch.full(x.shape[:2], value, dtype=torch.float32, device=x.device)


@dataclass(frozen=True)
class TrainedBlock:
    """A frame block whose exit step is trained.

    Attributes:
        frames: its frames in the clip.
    """

    step: ExitStep
    frames: slice


@dataclass(frozen=True)
class StreamClip:
    """The newest frames of a sequence, as critic and teacher see them.

    Attributes:
        latents: X, ``[b, t, c, h, w]``; without gradient, but for one-graph generation.
        mask: frames that count in the losses, bool ``[b, t]``: new ones, made under ``text``.
        text: current prompt, which the losses take for the whole clip, ``[b, l, d]``.
        blocks: to be run again with gradient; none if the clip was generated for the critic.
        samples: numbers of the b samples in the run.
        sequence: number of the sequence in the run.
        number: number of the clip in the sequence.
        first_new: absolute number of the first new frame.
        end: absolute number of the frame after the newest.
        exit_step: denoising step at which its new blocks end, counted from 0; None if they differ.
    """

    latents: Tensor
    mask: Tensor
    text: Tensor
    blocks: tuple[TrainedBlock, ...]
    samples: range
    sequence: int
    number: int
    first_new: int
    end: int
    exit_step: int | None = None
