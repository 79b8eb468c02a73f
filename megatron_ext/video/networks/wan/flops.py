"""Floating-point operations of a video DiT, as the training log counts them.

Only matrix products are counted: in causal attention those of a query with the keys that it attends
to. Recomputation is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from torch import Tensor

from megatron_ext.planning.products import FORWARD_AND_BACKWARD, MULTIPLY_AND_ADD
from megatron_ext.video.config.sizes import TIMESTEP_WIDTH
from megatron_ext.video.model.cache import KVCache
from megatron_ext.video.model.window import FrameWindow
from megatron_ext.video.networks.wan.config import VideoDiTSizes
from megatron_ext.video.networks.wan.model import VideoDiT


def flops_of_frames(
    sizes: VideoDiTSizes,
    window: FrameWindow | None,
    *,
    num_text: int,
    num_frames: int,
    tokens_per_frame: int,
    num_vision: int = 0,
) -> float:
    """Return the operations of a video DiT on one clip, forward and backward.

    ``window`` says which frames a causal model attends to; ``num_frames`` must then be whole blocks
    of frames. None means a bidirectional model. ``num_vision`` is the number of vision tokens.
    """
    frames = range(num_frames)
    seen = [
        (queries * tokens_per_frame, keys * tokens_per_frame)
        for queries, keys in _frames_seen(window, frames, {*frames})
    ]
    return FORWARD_AND_BACKWARD * flops_of_sample(
        sizes, seen, num_text=num_text, num_times=1, num_vision=num_vision
    )


def flops_of_pass(
    model: VideoDiT,
    *,
    x: Tensor,
    timesteps: Tensor,
    text: Tensor,
    vision: Tensor | None = None,
    cache: KVCache | None = None,
    first_frame: int = 0,
    **others: Any,
) -> float:
    """Return the operations of a forward pass of the whole model, on all ranks of a replica.

    ``model`` may be the chunk of any rank; the other arguments are those of `VideoDiT.forward`.
    If the cache holds the text's keys and values, computing them is not counted.
    """
    batch, frames, _, height, width = x.shape
    per_frame = height * width // model.sizes.patch_size**2
    new = range(first_frame, first_frame + frames)
    present = {*new, *(cache.frames if cache is not None else ())}
    seen = _frames_seen(model.options.window, new, present)
    knows_text = cache is not None and cache.memo.is_filled
    return batch * flops_of_sample(
        model.sizes,
        [(queries * per_frame, keys * per_frame) for queries, keys in seen],
        num_text=text.size(1),
        num_times=1 if timesteps.dim() == 1 else frames,
        embeds_text=not knows_text,
        num_vision=0 if vision is None else vision.size(1),
    )


def _frames_seen(
    window: FrameWindow | None, new: range, present: Set[int]
) -> Iterable[tuple[int, int]]:
    """Return (number of frames, number of frames attended to) of each block of frames in ``new``.

    A block attends to the frames in its window that are in ``present``, the frames whose keys
    exist. If ``window`` is None, all new frames are one block, which attends only to itself.
    """
    if window is None:
        return [(len(new), len(new))]
    return [
        (window.size_of(start), sum(f in present for part in window.visible(start) for f in part))
        for start in window.blocks(new.start, len(new))
    ]


def flops_of_sample(
    sizes: VideoDiTSizes,
    attended: Iterable[tuple[int, int]],
    *,
    num_text: int,
    num_times: int,
    embeds_text: bool = True,
    num_vision: int = 0,
) -> float:
    """Return the operations of a video DiT on one sample, forward only.

    Args:
        attended: for each block of frames, (number of its tokens, number of tokens to which it
            attends).
        num_times: number of timesteps: 1, or as many as there are frames.
        embeds_text: whether the pass computes the text's embedding, keys and values.
        num_vision: number of vision tokens.
    """
    h = sizes.hidden_size
    pairs = list(attended)
    tokens = sum(queries for queries, _ in pairs)
    # Queries, keys, values and projection of self-attention; queries and projection of
    # cross-attention; both matrices of the feed-forward layers; scores and their products with
    # values.
    block = tokens * (6 * h * h + 2 * h * sizes.ffn_size + 2 * (num_text + num_vision) * h)
    block += 2 * h * sum(queries * keys for queries, keys in pairs) + 2 * num_vision * h * h
    around = tokens * (sizes.input_width + sizes.token_width) * h
    around += num_times * h * (TIMESTEP_WIDTH + 7 * h)
    around += num_vision * sizes.vision_width * (sizes.vision_width + h)
    if embeds_text:
        block += 2 * num_text * h * h
        around += num_text * h * (sizes.text_width + h)
    return float(MULTIPLY_AND_ADD * (sizes.num_blocks * block + around))
