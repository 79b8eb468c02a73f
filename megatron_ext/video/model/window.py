"""The frames that a block of latent frames attends to in a causal network."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.window import FrameBlocks, WindowConfig


@dataclass(frozen=True)
class FrameWindow(FrameBlocks):
    """Block-causal attention over latent frames, as in LongLive (arXiv:2509.22622).

    Frames come in blocks that are denoised together. The queries of a block see the whole block,
    the sink frames and the frames right before the block, but no later block.

    Attributes:
        window: largest number of frames that a query sees, including the sinks and the query's own
            block.
        sink: number of sink frames. These are the first frames of the video; all later queries see
            them.

    Raises:
        ConfigError: the numbers of frames do not fit together.
    """

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
        """Return (sinks, other frames) seen by the block that begins at frame ``start``."""
        end = start + self.size_of(start)
        local_start = max(self.sink, end - (self.window - self.sink))
        return range(min(self.sink, end)), range(local_start, max(end, local_start))

    def capacity_for(self, chunk_frames: int) -> int:
        """Return how many frames a cache must hold so that its newest ones can be run again.

        These are ``chunk_frames`` frames. Their first block also sees the ``window - block`` frames
        before it.
        """
        return self.window + chunk_frames - self.block


def window_of(flags: WindowConfig) -> FrameWindow:
    """Return the `FrameWindow` that the flags of a causal network give.

    ConfigError is raised if the window is too small.
    """
    block = flags.frame_block
    sink = flags.sink_frames
    if flags.window_frames - sink < block:
        raise ConfigError(
            f"`--window-frames` ({flags.window_frames}) must be at least `--sink-frames` + "
            f"`--frame-block` ({sink} + {block} = {sink + block}), or a block would not see all "
            "of itself."
        )
    alone = flags.independent_first_frame
    if alone and block == 1:
        raise ConfigError(
            "`--independent-first-frame` has no effect with `--frame-block 1`, whose blocks are "
            "single frames; leave one of them out."
        )
    return FrameWindow(block, flags.window_frames, sink, first_alone=alone)
