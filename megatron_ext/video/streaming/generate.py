"""Generate videos of any length, block by block, with prompts that may change over time.

When the prompt changes, or a cache is lost, the past is encoded anew under the current prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.video.model.wan.attention import FrameWindow
from megatron_ext.video.streaming.noise_schedule import mixed
from megatron_ext.video.streaming.rollout import WRITE_BACK, BlockNoise, Generator, Recache


@dataclass(frozen=True)
class History:
    """Frames of a video, as they were generated.

    Attributes:
        newest: last frames, ``[b, t, c, h, w]``.
        length: number of frames so far; those of ``newest`` are at their end.
        sinks: first frames, at least `num_sinks` of them if there are so many.
    """

    newest: Tensor
    length: int
    sinks: Tensor


def num_sinks(window: FrameWindow) -> int:
    """Return how many first frames must be kept: the sinks, in whole blocks."""
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
        generator: its cache is filled.
        history: has the last ``frames`` at least, if there are so many.
        text: ``[b, l, d]``.
        noise: the noise that the frames were written with.
        frames: how many of the newest frames are encoded, at most.
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
        timestep=generator.schedule.streaming.context_noise,
        text=text,
        sink_latents=sink_latents,
        keep_sink=keep_sink,
    )


def _as_context(
    generator: Generator, latents: Tensor, first_frame: int, noise: BlockNoise
) -> Tensor:
    """Return frames of the past as the generator sees them when they are encoded anew."""
    sigma, block = generator.schedule.context_sigma(recached=True), generator.cache.window.block
    if not sigma:
        return latents
    frames = range(first_frame, first_frame + latents.size(1), block)
    drawn = torch.cat([noise(frame, WRITE_BACK) for frame in frames], dim=1)
    return mixed(latents, drawn, torch.tensor(sigma))


@dataclass(frozen=True)
class Scene:
    """Prompts of a batch of videos from a frame on.

    Attributes:
        first_frame: first latent frame that is made under them; the start of a block.
        text: embeddings, ``[b, l, d]``.
    """

    first_frame: int
    text: Tensor


def generate_blocks(
    generator: Generator,
    recache: Recache,
    scenes: Sequence[Scene],
    noise: BlockNoise,
    *,
    num_frames: int,
    keep_sink: bool,
) -> Iterator[tuple[int, Tensor]]:
    """Generate a batch of videos with all denoising steps, giving each block when it is made.

    Memory does not grow with the length: it holds the cache, of which the window is enough
    (``network.new_cache(b, h, w)``), and as many latent frames. Where the prompt changes, the last
    frames that the window holds are encoded anew, as LongLive's sampling does (arXiv:2509.22622).
    No random numbers are drawn but those of ``noise``, and no weights are changed.

    Args:
        generator: its cache is begun anew.
        scenes: in their order, the first from frame 0 on.
        noise: see `BlockNoise`; decides shape, dtype and device of the latents.
        num_frames: latent frames of each video, whole blocks.
        keep_sink: where the prompt changes, sink frames stay as the first prompt made them; else
            they are encoded anew as well.

    Yields:
        The number of the block's first frame, and its clean latents ``[b, block, c, h, w]``.

    Raises:
        DataError: scenes or a length that are no whole blocks, or scenes out of order or beyond the
            end; before the first block.
    """
    window = generator.cache.window
    _check(scenes, num_frames, window.block)

    def blocks() -> Iterator[tuple[int, Tensor]]:
        starts = {scene.first_frame: scene.text for scene in scenes}
        kept = -(-window.window // window.block)
        newest, sinks = deque[Tensor](maxlen=kept), list[Tensor]()
        last_step = len(generator.schedule.denoising_timesteps) - 1
        generator.cache.reset()
        text = starts[0]
        for frame in range(0, num_frames, window.block):
            if frame and frame in starts:
                text = starts[frame]
                past = torch.cat(list(newest), dim=1)
                history = History(past, frame, torch.cat(sinks, dim=1) if sinks else past[:, :0])
                frames = kept * window.block
                encode_anew(
                    generator, recache, history, text, noise, frames=frames, keep_sink=keep_sink
                )
            latents, _ = generator.generate(frame, text, noise, exit_step=last_step, graph=False)
            newest.append(latents)
            if frame < num_sinks(window):
                sinks.append(latents)
            yield frame, latents

    # The scenes are checked when this function is called, not when the first block is asked for.
    return blocks()


def _check(scenes: Sequence[Scene], num_frames: int, block: int) -> None:
    starts = [scene.first_frame for scene in scenes]
    if num_frames < block or num_frames % block:
        raise DataError(
            f"`num_frames` ({num_frames}) must be a positive multiple of the frame block ({block})."
        )
    in_order = starts[:1] == [0] and all(x < y for x, y in zip(starts, starts[1:], strict=False))
    if not in_order or starts[-1] >= num_frames or any(start % block for start in starts):
        raise DataError(
            f"the scenes begin at frames {', '.join(map(str, starts)) or 'none'}, but must begin "
            f"at 0 and at later multiples of the frame block ({block}), in order and before the "
            f"end ({num_frames})."
        )
