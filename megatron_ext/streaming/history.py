"""The past of a video, encoded anew when its prompt changes or its cache is lost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.losses.noise_schedule import mixed
from megatron_ext.streaming.network import Recache, Window
from megatron_ext.streaming.rollout import WRITE_BACK, BlockNoise, Generator


@dataclass(frozen=True)
class History:
    """Frames of a video, as they were generated.

    Attributes:
        newest: last frames, ``[b, t, c, h, w]``.
        length: frames so far, those of ``newest`` at their end.
        sinks: first frames, at least `num_sinks` of them if there are so many.
    """

    newest: Tensor
    length: int
    sinks: Tensor


def num_sinks(window: Window) -> int:
    """First frames that must be kept: the sinks, in whole blocks."""
    return -(-window.sink // window.block) * window.block


def encode_anew(
    generator: Generator,
    recache: Recache,
    history: History,
    text: Tensor,
    noise: BlockNoise,
    *,
    frames: int,
    keep_sink: bool,
) -> None:
    """Fill the generator's cache with the past as a prompt would have made it.

    Args:
        generator: see there.
        recache: see `Recache`.
        history: with the last ``frames`` at least, if there are so many.
        text: ``[b, l, d]``.
        noise: that the frames were written with.
        frames: newest ones to be encoded, at most.
        keep_sink: leave the sinks as they are in the cache; else they are encoded too.
    """
    sinks = num_sinks(generator.cache.window)
    if keep_sink and history.length <= sinks:
        return  # nothing but sinks
    first = max(0, history.length - frames, sinks if keep_sink else 0)
    sink_latents = None
    if first and not keep_sink and sinks:
        sink_latents = _as_context(generator, history.sinks[:, :sinks], 0, noise)
    newest = history.newest[:, history.newest.size(1) - (history.length - first) :]
    recache(
        generator.network,
        generator.cache,
        latents=_as_context(generator, newest, first, noise),
        first_frame=first,
        timestep=generator.schedule.config.context_noise,
        text=text,
        sink_latents=sink_latents,
        keep_sink=keep_sink,
    )


def _as_context(
    generator: Generator, latents: Tensor, first_frame: int, noise: BlockNoise
) -> Tensor:
    """Frames of the past as the generator sees them when they are encoded anew."""
    sigma, block = generator.schedule.context_sigma(recached=True), generator.cache.window.block
    if not sigma:
        return latents
    frames = range(first_frame, first_frame + latents.size(1), block)
    drawn = torch.cat([noise(frame, WRITE_BACK) for frame in frames], dim=1)
    return mixed(latents, drawn, torch.tensor(sigma))
