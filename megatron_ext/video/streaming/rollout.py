"""What streaming needs of networks, caches and codecs.

`video.model.wan` has networks and a cache of this kind.

Generation of frame blocks: first without gradient, then their exit steps once more with it.

A block is denoised from noise up to its exit step, whose clean latents are the block (arXiv:
2506.08009), and which are then written into the cache for later blocks. Only the exit step is
trained, and past frames are constants to it. So the gradient of a loss on the latents can be had
before any backward pass: generate all blocks without gradient, then run each exit step again from
the input that was recorded. Peak memory is that of one block, and blocks are independent
micro-batches.

A chunk of a sequence, as critic and teacher see it, and which of its frames are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.loss import x0_from_flow
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule, mixed


class Window(Protocol):
    """Which frames a frame sees, see `video.model.wan.FrameWindow`."""

    @property
    def block(self) -> int:
        """Frames that see each other."""

    @property
    def window(self) -> int:
        """Frames that a frame sees at most, its block and the sinks among them."""

    @property
    def sink(self) -> int:
        """First frames of the video, which are always seen."""


class FrameCache(Protocol):
    """Keys and values of past frames. It holds no graph."""

    @property
    def window(self) -> Window:
        """Of the network."""

    @property
    def capacity_frames(self) -> int:
        """Frames that it holds."""

    def reset(self, *, keep_sink: bool = False) -> None:
        """Begin a new sequence: nothing of the old one is seen, nor its text."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors and numbers, for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""


class FlowNetwork(Protocol):
    """Critic or teacher: predicts the flow, noise - x0, of noised latents."""

    def __call__(self, *, x: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """Flow of ``x``.

        Args:
            x: noised latents, ``[b, t, c, h, w]``.
            timesteps: of samples ``[b]`` or of frames ``[b, t]``, float32, 0 to 1000.
            text: embeddings of prompts, ``[b, l, d]``.
        """


class CausalNetwork(Protocol):
    """Generator: a flow network that sees past frames through a cache."""

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
        """Flow of whole blocks of frames; the other arguments as of `FlowNetwork`.

        Args:
            x: noised latents, ``[b, t, c, h, w]``.
            timesteps: of frames ``[b, t]``.
            text: embeddings of prompts, ``[b, l, d]``.
            cache: of the frames before, a `FrameCache`.
            first_frame: absolute number of the first of the t frames.
            update_cache: write these frames into the cache.
        """


class Recache(Protocol):
    """Fills a cache anew, block by block, see `video.model.wan.recache`."""

    def __call__(
        self,
        model: Any,
        cache: Any,
        /,
        *,
        latents: Tensor,
        first_frame: int,
        timestep: float,
        text: Tensor,
        sink_latents: Tensor | None = None,
        keep_sink: bool = False,
    ) -> None:
        """Leave nothing in the cache that was made under another prompt.

        Args:
            model: the generator.
            cache: to be filled.
            latents: frames up to the newest, ``[b, t, c, h, w]``.
            first_frame: absolute number of the first of them.
            timestep: that the model is told.
            text: the new prompt, ``[b, l, d]``.
            sink_latents: whole blocks of frames from frame 0 on, where ``first_frame`` is above 0.
            keep_sink: leave the sink frames as they are.
        """


class FirstFrame(Protocol):
    """Turns the newest of some latent frames into the latent of an image."""

    def __call__(self, latents: Tensor) -> Tensor:
        """``[b, 1, c, h, w]`` of frames in order, ``[b, t, c, h, w]``."""


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


@dataclass(frozen=True)
class TrainedBlock:
    """A block whose exit step is trained.

    Attributes:
        step: see `ExitStep`.
        frames: of it, in the chunk.
    """

    step: ExitStep
    frames: slice


@dataclass(frozen=True)
class StreamChunk:
    """The newest frames of a sequence.

    Attributes:
        latents: X, ``[b, t, c, h, w]``; without gradient, but for one-graph generation.
        mask: frames that count in the losses, bool ``[b, t]``: new ones, made under ``text``.
        text: current prompt, which the losses take for the whole chunk, ``[b, l, d]``.
        blocks: to be run again with gradient; none if the chunk was generated for the critic.
        samples: numbers in the run of the b samples.
        sequence: number of the sequence in the run.
        number: of the chunk in the sequence.
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


def assembled(
    known: Tensor, *, frames: int, first_frame: FirstFrame | None, whole_history: bool
) -> tuple[Tensor, bool]:
    """The frames of a chunk, and whether the first of them is encoded anew.

    Teacher and critic were trained on clips, whose first latent frame is that of an image. Where
    frames come before the chunk, its own first frame is replaced by such a latent, without
    gradient.

    Args:
        known: newest frames, at least ``frames`` of them, ``[b, t, c, h, w]``.
        frames: of the chunk.
        first_frame: encodes anew; None leaves all frames as they are.
        whole_history: ``first_frame`` gets all known frames up to the chunk's first, else only
            those of the chunk.

    Returns:
        ``[b, frames, c, h, w]`` and a bool.
    """
    chunk = known[:, -frames:]
    if first_frame is None or known.size(1) == frames:
        return chunk, False
    history = known[:, : 1 - frames] if whole_history else chunk[:, :1]
    with torch.no_grad():
        image = first_frame(history.detach()).to(chunk.dtype)
    return torch.cat([image, chunk[:, 1:]], dim=1), True


def new_frame_mask(*, frames: int, first_counted: int, encoded_anew: bool) -> Tensor:
    """Frames of a chunk that count, bool ``[frames]``.

    Args:
        frames: of the chunk.
        first_counted: first of them that is new and made under the current prompt.
        encoded_anew: the first frame of the chunk is no generated frame.
    """
    return torch.arange(frames) >= max(first_counted, int(encoded_anew))
