"""Blocks of latent frames that are denoised together, and flags of a causal window over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.config.flags import NATURAL, SIZE, flag
from megatron_ext.errors import DataError

WINDOW = ("frame_block", "independent_first_frame", "window_frames", "sink_frames")
"""Names of fields of `WindowConfig` that decide which frames a causal model attends to."""


def stored_window(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's flags of a causal window, by field.

    Flags that a checkpoint of an earlier version lacks are left out.
    """
    flags = stored["streaming"]
    return {name: flags[name] for name in WINDOW if name in flags}


@dataclass(frozen=True)
class FrameBlocks:
    """The division of a video's latent frames into blocks; a block is denoised as a whole.

    No other code computes where blocks begin.

    Attributes:
        block: number of frames in a block, B.
        first_alone: whether the first frame of a video is a block of its own, so that blocks begin
            at frames 0, 1, 1 + B, 1 + 2 B and so on, instead of at multiples of B.
    """

    block: int = 3
    first_alone: bool = field(default=False, kw_only=True)

    @property
    def first(self) -> int:
        """Return the number of frames in the first block of a video."""
        return 1 if self.first_alone else self.block

    def size_of(self, start: int) -> int:
        """Return the number of frames in the block that begins at ``start``."""
        return self.block if start else self.first

    def begins(self, frame: int) -> bool:
        """Return whether a block begins at ``frame``."""
        return self.at_or_before(frame) == frame

    def at_or_before(self, frame: int) -> int:
        """Return the first frame of the block that contains ``frame``."""
        return 0 if frame < self.first else frame - (frame - self.first) % self.block

    def at_or_after(self, frame: int) -> int:
        """Return the first frame, from ``frame`` on, at which a block begins."""
        if frame <= 0:
            return 0
        return self.first + max(0, -((self.first - frame) // self.block)) * self.block

    def blocks(self, first_frame: int, num_frames: int) -> Iterator[int]:
        """Return an iterator over the first frames of the blocks in a range of frames.

        The range has ``num_frames`` frames and begins at ``first_frame``.

        Raises:
            DataError: the frames are not whole blocks.
        """
        end = first_frame + num_frames
        head = "1 + " if self.first_alone and first_frame == 0 else ""
        for name, value, fits, rule in (
            ("first_frame", first_frame, self.begins(first_frame),
             "0 or 1 + a" if self.first_alone else "a"),
            ("num_frames", num_frames, num_frames >= 0 and self.begins(end), f"{head}a"),
        ):  # fmt: skip
            if not fits:
                raise DataError(
                    f"`{name}` ({value}) must be {rule} multiple of the frame block "
                    f"({self.block}); run whole blocks, which are denoised together."
                )
        later = range(max(first_frame, self.first), end, self.block)
        return itertools.chain(range(first_frame, min(end, 1)), later)

    def count(self, num_frames: int) -> int:
        """Return the number of blocks in a video of ``num_frames`` frames.

        DataError is raised if these frames are not whole blocks.
        """
        return len([*self.blocks(0, num_frames)])

    @property
    def rule(self) -> str:
        """Return how many frames a video of whole blocks may have, as text for an error message.

        Example: "1 + a multiple of `--frame-block` (3)".
        """
        if self.first_alone:
            return f"1 + a multiple of `--frame-block` ({self.block})"
        return f"a positive multiple of `--frame-block` ({self.block})"


_FRAMES = "latent frames"


@dataclass(frozen=True)
class WindowConfig:
    """Flags of networks that streaming can train: initial weights, recomputation, causal window.

    `StreamingConfig` inherits these flags. Flow matching takes them, too, if it trains one of these
    networks.
    """

    zero_head: bool = flag(
        True, "the last layers of new networks start at zero", if_changed="allow"
    )
    recompute_blocks: int = flag(
        0, "first blocks that keep only their inputs", NATURAL, if_changed="allow"
    )
    frame_block: int = flag(3, "frames that are denoised together", SIZE, _FRAMES)
    independent_first_frame: bool = flag(
        False,
        "the first frame of a video is a block of its own, so that an image is exactly that block; "
        "lengths of videos and chunks are then 1 + a multiple of --frame-block",
    )
    window_frames: int = flag(12, "frames that a frame sees, sinks included", SIZE, _FRAMES)
    sink_frames: int = flag(3, "first frames of a video, which are always seen", NATURAL, _FRAMES)

    @property
    def blocks(self) -> FrameBlocks:
        """Return the blocks that ``frame_block`` and ``independent_first_frame`` give.

        Other flags of the window are not checked, so this also works if they are wrong.
        """
        return FrameBlocks(max(1, self.frame_block), first_alone=self.independent_first_frame)
