"""Floating-point operations of a video DiT."""

from __future__ import annotations

from megatron_ext.config.mmdit_sizes import TIMESTEP_WIDTH
from megatron_ext.config.video_dit_sizes import VideoDiTSizes
from megatron_ext.models.causal_video.window import FrameWindow
from megatron_ext.models.mmdit.flops import FORWARD_AND_BACKWARD, MULTIPLY_AND_ADD


def flops_of_frames(
    sizes: VideoDiTSizes,
    window: FrameWindow | None,
    *,
    num_text: int,
    num_frames: int,
    tokens_per_frame: int,
) -> float:
    """Of one clip through the model, all frames at once, forward and backward.

    Matrix products only; of attention those that the window leaves; recomputation does not count.

    Args:
        sizes: of the model.
        window: which frames see which, None for all.
        num_text: text tokens.
        num_frames: t, whole blocks with a window.
        tokens_per_frame: N.
    """
    h, tokens = sizes.hidden_size, num_frames * tokens_per_frame
    pairs = seen_frames(window, num_frames) * tokens_per_frame**2
    # Queries, keys, values and projection of both attentions, the feed-forward layers, and scores
    # and their products with values.
    block = tokens * (6 * h * h + 2 * h * sizes.ffn_size) + num_text * 2 * h * h
    block += 2 * h * (pairs + tokens * num_text)
    embedders = 2 * tokens * sizes.token_width * h + num_text * (sizes.text_width + h) * h
    embedders += (TIMESTEP_WIDTH + 7 * h) * h
    return float(FORWARD_AND_BACKWARD * MULTIPLY_AND_ADD * (block * sizes.num_blocks + embedders))


def seen_frames(window: FrameWindow | None, num_frames: int) -> int:
    """Pairs of a frame and a frame that it sees."""
    if window is None:
        return num_frames**2
    return sum(
        window.block * sum(len(part) for part in window.visible(start))
        for start in window.blocks(0, num_frames)
    )
