"""Which frames a frame sees: a local window and the first frames of the video (attention sinks)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.errors import ConfigError, DataError


@dataclass(frozen=True)
class FrameWindow:
    """Block-causal attention over latent frames.

    Frames come in blocks that are denoised together. The queries of a block see the whole block,
    the sink frames, and the frames right before the block; nothing of a later block. This is the
    attention of LongLive (arXiv:2509.22622).

    Attributes:
        block: frames of a block, B.
        window: frames that a query sees at most, W, sinks and its own block among them.
        sink: first frames of the video, S, which are always seen.

    Raises:
        ConfigError: frames that do not fit together.
    """

    block: int = 3
    window: int = 12
    sink: int = 3

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ConfigError(f"`block` ({self.block}) must be 1 frame or more; 3 is usual.")
        if self.sink < 0:
            raise ConfigError(f"`sink` ({self.sink}) must be 0 frames or more; 0 means no sinks.")
        if self.window - self.sink < self.block:
            raise ConfigError(
                f"`window` ({self.window}) must be at least `sink` + `block` "
                f"({self.sink} + {self.block} = {self.sink + self.block}), or a block would not "
                "see all of itself."
            )

    def visible(self, start: int) -> tuple[range, range]:
        """Sink frames and local frames that the block from ``start`` on sees, both absolute."""
        end = start + self.block
        local_start = max(self.sink, end - (self.window - self.sink))
        return range(min(self.sink, end)), range(local_start, max(end, local_start))

    def blocks(self, first_frame: int, num_frames: int) -> Iterator[int]:
        """First frames of the blocks of a stretch of frames.

        Raises:
            DataError: frames that are not whole blocks.
        """
        for name, value in (("first_frame", first_frame), ("num_frames", num_frames)):
            if value % self.block or value < 0:
                raise DataError(
                    f"`{name}` ({value}) must be a multiple of the frame block ({self.block}); run "
                    "whole blocks, which are denoised together."
                )
        return iter(range(first_frame, first_frame + num_frames, self.block))

    def capacity_for(self, chunk_frames: int) -> int:
        """Frames that a cache must hold so that any block of the newest chunk can be run again.

        The first block of the chunk sees W - B frames before it; the chunk itself follows.

        Args:
            chunk_frames: frames from the first block that may be run again to the newest frame;
                one block if none is ever run again after the next was started.
        """
        return self.window + chunk_frames - self.block
