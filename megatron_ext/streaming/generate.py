"""Generation of videos of any length, block by block, with prompts that may change on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.streaming.history import History, encode_anew, num_sinks
from megatron_ext.streaming.network import Recache
from megatron_ext.streaming.rollout import BlockNoise, Generator


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

    What is held does not grow with the length: the cache, of which the window is enough
    (``network.new_cache(b, h, w)``), and as many latent frames. Where the prompt changes, the last
    frames that the window holds are encoded anew, as LongLive's sampling does (arXiv:2509.22622).
    No random numbers are drawn but those of ``noise``, and no weights are changed.

    Args:
        generator: whose cache is begun anew.
        recache: see `Recache`.
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
    block = generator.cache.window.block
    _check(scenes, num_frames, block)
    return _blocks(generator, recache, scenes, noise, num_frames=num_frames, keep_sink=keep_sink)


def _blocks(
    generator: Generator,
    recache: Recache,
    scenes: Sequence[Scene],
    noise: BlockNoise,
    *,
    num_frames: int,
    keep_sink: bool,
) -> Iterator[tuple[int, Tensor]]:
    window = generator.cache.window
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
