"""The compiled functions of the video networks; see `cases` for what a case is.

Open-Sora 2.0's widths at 8192 tokens, an eighth of which is text, and Wan 2.1's with 21 frames.
"""

from __future__ import annotations

from torch import Tensor

from megatron_ext.video.model import joint_pointwise as mmdit
from megatron_ext.video.model import linear
from megatron_ext.video.networks.wan import pointwise as wan
from tests.gpu_proof.cases import RMS, Case, D, H, S, half, hidden, single

TXT, IMG = S // 8, S - S // 8
FRAMES, TOKENS = 21, 390
LAYER = ("LayerNorm", 1e-6, False)
SIZES = (D, H, 1e-6)


def vector() -> Tensor:
    """Return the shift, scale or gate of a sample, ``[b, h]``."""
    return half(1, H)


def txt() -> Tensor:
    return half(TXT, 1, H)


def img() -> Tensor:
    return half(IMG, 1, H)


def added() -> tuple[Tensor, ...]:
    """Return outputs, biases and gates of both streams, text first."""
    return txt(), img(), half(H), half(H), vector(), vector()


def vectors(count: int) -> tuple[Tensor, ...]:
    return tuple(vector() for _ in range(count))


def angles(length: int) -> tuple[Tensor, Tensor]:
    return single(length, 1, 1, D // 2), single(length, 1, 1, D // 2)


def frames() -> Tensor:
    """Return the hidden states of a video, ``[s, b, h]``."""
    return half(FRAMES * TOKENS, 1, H)


def of_frames(count: int) -> tuple[Tensor, ...]:
    """Return shifts, scales or gates of all frames, ``[f, 1, b, h]`` each."""
    return tuple(half(FRAMES, 1, 1, H) for _ in range(count))


def frame_angles() -> tuple[Tensor, Tensor]:
    shape = (FRAMES, TOKENS, 1, 1, D // 2)
    return single(*shape), single(*shape)


def frame_heads() -> Tensor:
    return half(FRAMES * TOKENS, 1, H // D, D)


MMDIT = (
    Case("modulated", linear.modulated_alone, lambda: (hidden(), *vectors(2)), (1, 1), (2, 3.06)),
    Case(
        "residual_and_modulated",
        mmdit.residual_and_modulated,
        lambda: (hidden(), *vectors(2)),
        (1, 2),
        (2, 4.06),
    ),
    Case(
        "residual_and_modulated_streams",
        mmdit.residual_and_modulated_streams,
        lambda: (hidden(), TXT, *vectors(4)),
        (2, 5),
        (3, 7.19),
    ),
    Case(
        "add_gated",
        mmdit.add_gated,
        lambda: (hidden(), hidden(), hidden(), half(H), vector()),
        (1, 4),
        (5, 5.06),
    ),
    Case("add_streams", mmdit.add_streams, lambda: (hidden(), *added()), (1, 9), (3, 7.06)),
    Case(
        "add_and_modulate_streams",
        mmdit.add_and_modulate_streams,
        lambda: (hidden(), *added(), *vectors(4)),
        (2, 9),
        (6, 10.38),
        stack=16,  # on sm_100
    ),
    Case(
        "mmdit_heads",
        mmdit.heads,
        lambda: (half(S, 1, 3 * H), half(3 * H), half(D), half(D), *angles(S), RMS),
        (4, 6),
        (5.7, 6.39),
    ),
    Case(
        "joint_heads",
        mmdit.joint_heads,
        lambda: (
            *(half(IMG, 1, 3 * H), half(3 * H), half(TXT, 1, 3 * H), half(3 * H)),
            *(half(D) for _ in range(4)),
            *angles(S),
            RMS,
        ),
        (10, 12),
        (10.39, 8.09),
    ),
)

WAN = (
    Case(
        "modulated_frames",
        wan.modulated_frames_alone,
        lambda: (frames(), *of_frames(2)),
        (1, 2),
        (2.01, 5.01),
    ),
    Case(
        "residual_and_modulated_frames",
        wan.residual_and_modulated,
        lambda: (frames(), *of_frames(2)),
        (1, 2),
        (2.01, 6.01),
    ),
    Case(
        "whole_norm",
        wan._whole_norm,
        lambda: (frame_heads(), half(H), half(H), H, 1e-6),
        (1, 3),
        (2, 4.05),
    ),
    Case("squares", wan._squares, lambda: (frame_heads(), half(H)), (1, 3), (1, 3.02)),
    Case(
        "scaled",
        wan._scaled,
        lambda: (
            frame_heads(),
            half(H),
            single(FRAMES * TOKENS, 1).requires_grad_(),
            half(H),
            H,
            1e-6,
        ),
        (1, 3),
        (2, 4.05),
    ),
    Case(
        "gated", wan.gated, lambda: (frames(), frames(), half(H), *of_frames(1)), (1, 3), (3, 4.03)
    ),
    Case(
        "gated_and_normed",
        wan.gated_and_normed,
        lambda: (frames(), frames(), half(H), *of_frames(1), half(H), half(H), LAYER),
        (1, 5),
        (4, 8.07),
    ),
    Case(
        "added_and_modulated",
        wan.added_and_modulated,
        lambda: (frames(), frames(), half(H), *of_frames(2)),
        (1, 4),
        (4.01, 7.03),
    ),
    Case(
        "squares_of_heads",
        wan.squares_of_heads,
        lambda: (half(FRAMES * TOKENS, 1, 3 * H), half(3 * H), D),
        (3, 3),
        (2.67, 2.67),
    ),
    Case(
        "wan_heads",
        wan.heads,
        lambda: (
            *(half(FRAMES * TOKENS, 1, 3 * H), half(3 * H), None, half(H), half(H)),
            *frame_angles(),
            *(SIZES, 1, FRAMES),
        ),
        (4, 6),
        (5.7, 5.04),
    ),
)
