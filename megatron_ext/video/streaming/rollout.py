"""Generates frame blocks without gradient, then runs the last step of each again with gradient.

A block is denoised from noise up to its exit step. The clean latents that this step predicts are
the block (arXiv:2506.08009); they are written into the cache for later blocks. Only the exit step
is trained; past frames are constants. Therefore the gradient of a loss on the latents can be
computed before any backward pass: generate all blocks without gradient, compute the gradient, then
run each exit step again from its recorded input. Peak memory is that of one block, and blocks are
independent micro-batches. Without ``two_phase``, exit steps run with gradient at once.

Sampling generates videos of any length in the same way, with all denoising steps. When the prompt
changes, or a cache was lost, past frames are encoded again under the current prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.video.loss import x0_from_flow
from megatron_ext.video.model.cache import KVCache, recache
from megatron_ext.video.model.window import FrameWindow
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule, mixed

Network = Callable[..., Tensor]
"""A network that predicts the flow, noise - x0, from the keywords ``x``, ``timesteps`` and
``text``.

A generator also takes ``cache``, ``first_frame`` and ``update_cache``."""

BlockNoise = Callable[[int, int], Tensor]
"""A function from (first frame of a block, denoising step or `WRITE_BACK`) to the block's noise,
``[b, t, c, h, w]``."""

WRITE_BACK = -1
"""The step to pass to `BlockNoise` for noise added to a clean block before the cache gets it."""


@dataclass(frozen=True)
class ExitStep:
    """The inputs of the denoising step at which a block is finished.

    Attributes:
        x: noised latents, ``[b, block, c, h, w]``, with the same timestep for all frames.
        text: embeddings of the prompt, ``[b, l, d]``.
        first_frame: index of the block's first frame in the video.
    """

    x: Tensor
    timestep: float
    text: Tensor
    first_frame: int


@dataclass(frozen=True)
class History:
    """Past frames of a video, as clean latents, from which the cache can be computed again.

    Attributes:
        newest: the last t frames, ``[b, t, c, h, w]``.
        length: number of frames so far, including ``newest``.
        sinks: the first frames, to which all later frames attend: `num_sinks` frames or more, or
            all frames of a shorter video.
    """

    newest: Tensor
    length: int
    sinks: Tensor


@dataclass(frozen=True)
class Generator:
    """The generator network with its cache and its noise schedule.

    Attributes:
        recache: a function like `model.cache.recache`, which computes the keys and values of past
            frames again under another prompt.
    """

    network: Network
    cache: KVCache
    schedule: NoiseSchedule
    recache: Callable[..., None] = recache

    def clean(self, step: ExitStep) -> Tensor:
        """Return the clean latents that a denoising step predicts, ``[b, block, c, h, w]``.

        The cache is read but not written, since later blocks must not attend to noised frames.
        Training with ``two_phase`` calls this again, with gradient, for the exit step.
        """
        t = _timesteps(step.timestep, step.x)
        flow = self.network(
            x=step.x, timesteps=t, text=step.text, cache=self.cache, first_frame=step.first_frame,
            update_cache=False,
        )  # fmt: skip
        return x0_from_flow(step.x, flow, self.schedule.sigma(t))

    def generate(
        self, first_frame: int, text: Tensor, noise: BlockNoise, *, exit_step: int, graph: bool
    ) -> tuple[Tensor, ExitStep]:
        """Generate the block that begins at ``first_frame``, and write it into the cache.

        This takes ``exit_step + 2`` forward passes.

        Args:
            exit_step: denoising step, counted from 0, whose clean latents are the block.
            graph: whether to run the exit step with gradient.

        Returns:
            Clean latents ``[b, block, c, h, w]``, and the inputs of the exit step.
        """
        timesteps = self.schedule.denoising_timesteps
        x = noise(first_frame, 0)
        with torch.no_grad():
            for step in range(exit_step):
                x0 = self.clean(ExitStep(x, timesteps[step], text, first_frame))
                fresh = noise(first_frame, step + 1)
                t = timesteps[step + 1]
                x = self.schedule.add_noise(x0, fresh, _timesteps(t, x0))
        last = ExitStep(x, timesteps[exit_step], text, first_frame)
        with torch.set_grad_enabled(graph):
            x0 = self.clean(last)
        self.write_back(x0.detach(), first_frame, text, noise)
        return x0, last

    def write_back(self, x0: Tensor, first_frame: int, text: Tensor, noise: BlockNoise) -> None:
        """Run the generator on a clean block ``x0``, to write its keys and values into the cache.

        If ``--context-noise`` asks for it, ``noise`` is first added to the block.
        """
        sigma = self.schedule.context_sigma()
        if sigma:
            x0 = mixed(x0, noise(first_frame, WRITE_BACK), torch.tensor(sigma))
        t = _timesteps(self.schedule.streaming.context_noise, x0)
        with torch.no_grad():
            self.network(x=x0, timesteps=t, text=text, cache=self.cache, first_frame=first_frame)

    def encode_again(
        self, history: History, text: Tensor, noise: BlockNoise, *, frames: int, keep_sink: bool
    ) -> None:
        """Refill the cache by encoding past frames under a prompt.

        Args:
            history: has at least the last ``frames`` frames, or all frames of a shorter video.
            text: embeddings of the prompt, ``[b, l, d]``.
            noise: the noise with which the frames were first written into the cache.
            frames: the largest number of frames to encode, counted back from the newest.
            keep_sink: whether to keep the cached sinks, the first frames, and not encode them.
        """
        sinks = num_sinks(self.cache.window)
        if keep_sink and history.length <= sinks:
            return  # All frames are sinks, which are kept.
        first = max(0, history.length - frames, sinks if keep_sink else 0)
        sink_latents = None
        if first and not keep_sink and sinks:
            sink_latents = self._as_context(history.sinks[:, :sinks], 0, noise)
        newest = history.newest[:, history.newest.size(1) - (history.length - first) :]
        self.recache(
            self.network,
            self.cache,
            latents=self._as_context(newest, first, noise),
            first_frame=first,
            timestep=self.schedule.streaming.context_noise,
            text=text,
            sink_latents=sink_latents,
            keep_sink=keep_sink,
        )

    def _as_context(self, latents: Tensor, first_frame: int, noise: BlockNoise) -> Tensor:
        """Return past frames with the noise that they get when they are encoded again."""
        sigma = self.schedule.context_sigma(recached=True)
        if not sigma:
            return latents
        frames = self.cache.window.blocks(first_frame, latents.size(1))
        drawn = torch.cat([noise(frame, WRITE_BACK) for frame in frames], dim=1)
        return mixed(latents, drawn, torch.tensor(sigma))


def num_sinks(window: FrameWindow) -> int:
    """Return the number of sink frames, rounded up to whole blocks.

    Sinks are the first frames of a video, to which all later frames attend.
    """
    return window.at_or_after(window.sink)


def _timesteps(value: float, x: Tensor) -> Tensor:
    """Return ``value`` as the timestep of all frames of ``x``, ``[b, t]`` float32."""
    return torch.full(x.shape[:2], value, dtype=torch.float32, device=x.device)


@dataclass(frozen=True)
class StreamClip:
    """The newest frames of a sequence, the input of critic and teacher.

    Attributes:
        latents: X, ``[b, t, c, h, w]``; with gradient only for the generator without ``two_phase``.
        mask: True at frames with a loss, ``[b, t]``: new frames generated under ``text``.
        text: embeddings of the current prompt, ``[b, l, d]``; the losses use it for all frames.
        blocks: exit steps to run again with gradient; empty for the critic or without
            ``two_phase``.
        samples: indices of the clip's samples, counted over the run.
        sequence: index of the clip's sequence, counted over the run.
        number: index of this clip in the sequence.
        first_new: index of the clip's first new frame in the sequence.
        end: number of frames of the sequence up to and including this clip.
        exit_step: denoising step, from 0, at which all new blocks end; None if blocks may differ.
    """

    latents: Tensor
    mask: Tensor
    text: Tensor
    blocks: tuple[ExitStep, ...]
    samples: range
    sequence: int
    number: int
    first_new: int
    end: int
    exit_step: int | None = None

    def frames_of(self, step: ExitStep) -> slice:
        """Return the slice of the clip's frames that belong to the block of an exit step."""
        place = step.first_frame - (self.end - self.latents.size(1))
        return slice(place, place + step.x.size(1))


def generate_blocks(
    generator: Generator,
    texts: Mapping[int, Tensor],
    noise: BlockNoise,
    *,
    num_frames: int,
    keep_sink: bool,
    start: Tensor | None = None,
) -> Iterator[Tensor]:
    """Generate a batch of videos with all denoising steps; yield each block when it is finished.

    The memory does not grow with the length of the videos: it is a cache of one window
    (``network.new_cache(b, h, w)``), the latent frames of one window, and the first frames (sinks).
    When the prompt changes, the last frames of the window are encoded again, as in LongLive's
    sampling (arXiv:2509.22622).

    Args:
        generator: the generator, whose cache is emptied first.
        texts: embeddings ``[b, l, d]`` of the prompts, keyed by the latent frame from which each is
            used. Keys are starts of blocks and include 0.
        noise: the noise of blocks; latents have its shape, dtype and device.
        num_frames: number of latent frames of each video, in whole blocks.
        keep_sink: whether to keep the cached sinks of the first prompt when the prompt changes.
        start: clean latents of the first block; None generates it too.

    Yields:
        Clean latents of the next block, ``[b, block, c, h, w]``.
    """
    window = generator.cache.window
    kept = -(-window.window // window.block)
    newest = deque[Tensor](maxlen=kept)
    sinks = list[Tensor]()
    last_step = len(generator.schedule.denoising_timesteps) - 1
    generator.cache.reset()
    text = texts[0]
    for frame in window.blocks(0, num_frames):
        if frame and frame in texts:
            text = texts[frame]
            past = torch.cat(list(newest), dim=1)
            history = History(past, frame, torch.cat(sinks, dim=1) if sinks else past[:, :0])
            generator.encode_again(
                history, text, noise, frames=kept * window.block, keep_sink=keep_sink
            )
        if start is not None and frame == 0:
            latents = start
            generator.write_back(latents, frame, text, noise)
        else:
            latents, _ = generator.generate(frame, text, noise, exit_step=last_step, graph=False)
        newest.append(latents)
        if frame < num_sinks(window):
            sinks.append(latents)
        yield latents
