"""Sizes and flags of the video DiT, from ``tiny`` (tests on a CPU) to ``14b`` (Wan 2.1)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_ext.config.flags import NATURAL, SIZE, Changeable, derived, flag
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.mmdit import Sizes


@dataclass(frozen=True)
class VideoDiTSizes(Sizes):
    """All sizes that decide the shapes of a video DiT's parameters, whether causal or not.

    Sizes that do not fit together raise ConfigError.

    Attributes:
        hidden_size, num_heads: h and n; the size of a head d is h / n.
        ffn_size: width of the feed-forward layers.
        num_blocks: transformer blocks.
        channels: c of the latents.
        patch_size: p; a token holds p x p latent pixels of one frame, c * p * p numbers.
        text_width: features of a text token (4096 for umT5-XXL).
        rope_theta: base of the rotary frequencies.
    """

    hidden_size: int
    num_heads: int
    ffn_size: int
    num_blocks: int
    channels: int = 16
    patch_size: int = 2
    text_width: int = 4096
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` ({getattr(self, name)}) must be 1 or more.")
        self.check_heads()
        if self.head_dim % 2 or self.head_dim < 6:
            raise ConfigError(
                f"the size of a head, hidden_size / num_heads ({self.head_dim}), must be even and "
                "6 or more, so that pairs of features rotate with frame, row and column."
            )

    @property
    def axes_dim(self) -> tuple[int, int, int]:
        """Return how many features of a head RoPE rotates by frame, by row and by column."""
        space = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * space, space, space

    def transformer_fields(self) -> dict[str, Any]:
        """Return the fields of megatron-core's TransformerConfig that follow from the sizes."""
        return self.fields_of(self.num_blocks, self.ffn_size)


_POSITIVE = "hidden_size num_heads ffn_size num_blocks channels patch_size text_width".split()

SIZES = {
    "tiny": VideoDiTSizes(64, 4, 128, 2, channels=4, text_width=32),
    "mini": VideoDiTSizes(128, 4, 512, 4, text_width=64),
    "small": VideoDiTSizes(384, 6, 1536, 8, text_width=512),
    "base": VideoDiTSizes(768, 12, 3072, 16),
    "1.3b": VideoDiTSizes(1536, 12, 8960, 30),
    "14b": VideoDiTSizes(5120, 40, 13824, 40),
}
"""Named sizes; ``1.3b`` and ``14b`` are those of Wan 2.1 text to video (arXiv:2503.20314)."""


CAUSAL = "causal-video-dit"
VIDEO_MODELS = ("mmdit", "video-dit", CAUSAL)
WINDOW = ("frame_block", "independent_first_frame", "window_frames", "sink_frames")
"""Flags of `WanConfig` that say which frames a causal model attends to."""


@dataclass(frozen=True)
class FrameBlocks:
    """The blocks of latent frames that are denoised together: where each begins and ends.

    Nothing else knows where blocks begin.

    Attributes:
        block: number of frames in a block, B.
        first_alone: whether the first frame of a video is a block of its own, so that blocks begin
            at frames 0, 1, 1 + B, 1 + 2 B and so on, instead of at multiples of B.
    """

    block: int = 3
    first_alone: bool = field(default=False, kw_only=True)

    @property
    def first(self) -> int:
        """Return the number of frames in the first block."""
        return 1 if self.first_alone else self.block

    def size_of(self, start: int) -> int:
        """Return the number of frames in the block that begins at ``start``."""
        return self.block if start else self.first

    def begins(self, frame: int) -> bool:
        """Return whether a block begins at a frame; the frames before it are whole blocks then."""
        return self.at_or_before(frame) == frame

    def at_or_before(self, frame: int) -> int:
        """Return the start of the block in which a frame lies."""
        return 0 if frame < self.first else frame - (frame - self.first) % self.block

    def at_or_after(self, frame: int) -> int:
        """Return the first start of a block from a frame on."""
        if frame <= 0:
            return 0
        return self.first + max(0, -((self.first - frame) // self.block)) * self.block

    def blocks(self, first_frame: int, num_frames: int) -> Iterator[int]:
        """Return the first frame of each block among ``num_frames`` frames from ``first_frame`` on.

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
        """Return how many blocks the first ``num_frames`` frames of a video are."""
        return len([*self.blocks(0, num_frames)])

    @property
    def rule(self) -> str:
        """Return words for what the length of a video must be, to put after "must be"."""
        if self.first_alone:
            return f"1 + a multiple of `--frame-block` ({self.block})"
        return f"a positive multiple of `--frame-block` ({self.block})"


_FRAMES = "latent frames"


@dataclass(frozen=True)
class WanConfig:
    """The flags that networks of Wan's architecture share; `StreamingConfig` inherits them."""

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
        """Return where blocks begin; also for flags of the window that do not fit together."""
        return FrameBlocks(max(1, self.frame_block), first_alone=self.independent_first_frame)


@dataclass(frozen=True)
class VideoDiTConfig(Changeable):
    """The flags of a video DiT that ``--task flow`` trains.

    A streaming run can start from a checkpoint of this video DiT. The flags that also apply to the
    networks of streaming are in `WanConfig`.

    Attributes:
        dit_channels, dit_text_width: latent channels and text features of the data.
    """

    SECTION: ClassVar[str] = "video_dit"

    video_dit_size: str = flag("tiny", "named size of the video DiT", choices=tuple(SIZES))
    independent_block_timesteps: bool = flag(
        False,
        "each frame block has a timestep of its own, as if it were streamed",
        if_changed="refuse_to_resume",
    )
    dit_channels: int | None = derived(None)
    dit_text_width: int | None = derived(None)

    @property
    def sizes(self) -> VideoDiTSizes:
        """Return the named size with the channels and text width of the data."""
        named = SIZES[self.video_dit_size]
        return dataclasses.replace(
            named,
            channels=self.dit_channels or named.channels,
            text_width=self.dit_text_width or named.text_width,
        )
