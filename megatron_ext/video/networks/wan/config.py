"""Sizes and flags of the video DiT, from ``tiny`` (tests on a CPU) to ``14b`` (Wan 2.1)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import Changeable, derived, flag
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.sizes import StreamedSizes


@dataclass(frozen=True)
class VideoDiTSizes(StreamedSizes):
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
        """Return the numbers of a head's features that RoPE rotates by frame, row and column."""
        space = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * space, space, space


_POSITIVE = "hidden_size num_heads ffn_size num_blocks channels patch_size text_width".split()

SIZES = {
    "tiny": VideoDiTSizes(64, 4, 128, 2, channels=4, text_width=32),
    "mini": VideoDiTSizes(128, 4, 512, 4, text_width=64),
    "small": VideoDiTSizes(384, 6, 1536, 8, text_width=512),
    "base": VideoDiTSizes(768, 12, 3072, 16),
    "1.3b": VideoDiTSizes(1536, 12, 8960, 30),
    "14b": VideoDiTSizes(5120, 40, 13824, 40),
}
"""Sizes of the video DiT by name; ``1.3b`` and ``14b`` are Wan 2.1's (arXiv:2503.20314)."""


BIDIRECTIONAL = "video-dit"
CAUSAL = "causal-video-dit"
"""The value of ``--video-model`` for Wan's network with causal attention; else `BIDIRECTIONAL`."""


def is_causal(config: RunConfig) -> bool:
    """Return whether the network of a flow matching run has causal attention."""
    return config.section(VideoConfig).video_model == CAUSAL


@dataclass(frozen=True)
class VideoDiTConfig(Changeable):
    """The flags of a video DiT in ``--task flow`` alone.

    `WindowConfig` has the flags that also apply in ``--task streaming``.

    Attributes:
        dit_channels: latent channels of the data.
        dit_text_width: features of the data's text tokens.
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
        """Return the sizes of ``--video-dit-size``, with the data's channels and text width."""
        named = SIZES[self.video_dit_size]
        return dataclasses.replace(
            named,
            channels=self.dit_channels or named.channels,
            text_width=self.dit_text_width or named.text_width,
        )
