"""Sizes and flags of the video DiT, from ``tiny`` (tests on a CPU) to ``14b`` (Wan 2.1)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_ext.config.flags import SIZE, Changeable, derived, flag
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
        condition_channels: input channels behind the noised latents, for given frames: a mask and
            their latents (20 for Wan's I2V); 0 without them.
        vision_width: features of a token that a vision encoder gives for an image (1280 for CLIP
            ViT-H/14, as in Wan 2.1's I2V); cross-attention then has keys and values of its own for
            these tokens. 0 without them.
        vision_positions: vision tokens that have a learned position each, 0 if they have none; 514
            for the first and the last frame of Wan 2.1's FLF2V.
    """

    hidden_size: int
    num_heads: int
    ffn_size: int
    num_blocks: int
    channels: int = 16
    patch_size: int = 2
    text_width: int = 4096
    rope_theta: float = 10_000.0
    condition_channels: int = 0
    vision_width: int = 0
    vision_positions: int = 0

    def __post_init__(self) -> None:
        for names, least in ((_POSITIVE, 1), (_NATURAL, 0)):
            for name in names:
                if getattr(self, name) < least:
                    raise ConfigError(f"`{name}` ({getattr(self, name)}) must be {least} or more.")
        if self.vision_positions and not self.vision_width:
            raise ConfigError(
                f"`vision_positions` ({self.vision_positions}) needs `vision_width`, the features "
                "of the tokens that have these positions."
            )
        self.check_heads()
        if self.head_dim % 2 or self.head_dim < 6:
            raise ConfigError(
                f"the size of a head, hidden_size / num_heads ({self.head_dim}), must be even and "
                "6 or more, so that pairs of features rotate with frame, row and column."
            )

    @property
    def input_width(self) -> int:
        """Return how many values the network reads of a token: latents and conditions."""
        return (self.channels + self.condition_channels) * self.patch_size**2

    @property
    def axes_dim(self) -> tuple[int, int, int]:
        """Return the numbers of a head's features that RoPE rotates by frame, row and column."""
        space = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * space, space, space


_POSITIVE = "hidden_size num_heads ffn_size num_blocks channels patch_size text_width".split()
_NATURAL = ("condition_channels", "vision_width", "vision_positions")

SIZES = {
    "tiny": VideoDiTSizes(64, 4, 128, 2, channels=4, text_width=32),
    "mini": VideoDiTSizes(128, 4, 512, 4, text_width=64),
    "small": VideoDiTSizes(384, 6, 1536, 8, text_width=512),
    "base": VideoDiTSizes(768, 12, 3072, 16),
    "1.3b": VideoDiTSizes(1536, 12, 8960, 30),
    "5b": VideoDiTSizes(3072, 24, 14336, 30, channels=48),
    "14b": VideoDiTSizes(5120, 40, 13824, 40),
}
"""Sizes of the video DiT by name; ``1.3b`` and ``14b`` are those of Wan 2.1 (arXiv:2503.20314).

``5b`` is Wan 2.2 TI2V-5B; both networks of Wan 2.2 A14B are ``14b``."""


BIDIRECTIONAL = "video-dit"
CAUSAL = "causal-video-dit"
"""The value of ``--video-model`` for Wan's network with causal attention; else `BIDIRECTIONAL`."""


def name_of(sizes: VideoDiTSizes) -> str | None:
    """Return the name in `SIZES` of hidden size, heads, feed-forward width and number of blocks.

    Return None if they have no name.
    """
    own = {size: getattr(sizes, size) for size in OWN_SIZES}
    alike = (n for n, z in SIZES.items() if own.items() <= dataclasses.asdict(z).items())
    return next(alike, None)


def is_causal(config: RunConfig) -> bool:
    """Return whether the network of a flow matching run has causal attention."""
    return config.section(VideoConfig).video_model == CAUSAL


I2V = ("i2v", "i2v-clip", "flf2v-clip")
"""The values of ``--dit-condition`` by which given frames enter as input channels."""
CLIP = ("i2v-clip", "flf2v-clip")
"""The values of ``--dit-condition`` by which a vision encoder's tokens of frames enter, too."""
TI2V = "ti2v"
"""The value of ``--dit-condition`` by which given frames enter as frames with timestep 0."""
MASK_CHANNELS = 4
"""The channels of the mask of given frames: one for each frame that Wan's VAE joins to one."""
VISION_TOKENS = 257
VISION_WIDTH = 1280
"""The tokens that CLIP ViT-H/14 gives for an image, and their features, where no data says."""
OWN_SIZES = {
    "hidden_size": "dit_hidden_size",
    "num_heads": "dit_num_heads",
    "ffn_size": "dit_ffn_size",
    "num_blocks": "dit_num_blocks",
}
"""Sizes that flags can change, with the fields of these flags."""


@dataclass(frozen=True)
class VideoDiTConfig(Changeable):
    """The flags of a video DiT in ``--task flow`` alone.

    `WindowConfig` has the flags that also apply in ``--task streaming``.

    Attributes:
        dit_channels: latent channels of the data.
        dit_text_width: features of the data's text tokens.
        dit_mask_channels: channels of the mask of given frames: the temporal stride of the codec.
        dit_vision_width, dit_vision_tokens: features and number of the data's vision tokens of an
            image.
    """

    SECTION: ClassVar[str] = "video_dit"

    video_dit_size: str = flag("tiny", "named size of the video DiT", choices=tuple(SIZES))
    dit_hidden_size: int | None = flag(
        None, "hidden size of the video DiT, instead of the named size's", SIZE
    )
    dit_num_heads: int | None = flag(
        None,
        "attention heads of the video DiT, instead of the named size's",
        SIZE,
        if_changed="refuse_to_resume",
    )
    dit_ffn_size: int | None = flag(
        None, "width of its feed-forward layers, instead of the named size's", SIZE
    )
    dit_num_blocks: int | None = flag(
        None, "blocks of the video DiT, instead of the named size's", SIZE
    )
    dit_condition: str = flag(
        "none",
        "how given frames enter a video DiT; none: not; ti2v: as frames with timestep 0 (Wan 2.2 "
        "TI2V-5B); i2v: as input channels (Wan 2.2 I2V-A14B); i2v-clip: and as CLIP's tokens of "
        "the first given frame (Wan 2.1 I2V); flf2v-clip: and of first and last frame (Wan 2.1 "
        "FLF2V)",
        choices=("none", TI2V, *I2V),
        if_changed="refuse_to_resume",
    )
    independent_block_timesteps: bool = flag(
        False,
        "each frame block has a timestep of its own, as if it were streamed",
        if_changed="refuse_to_resume",
    )
    dit_channels: int | None = derived(None)
    dit_text_width: int | None = derived(None)
    dit_mask_channels: int = derived(MASK_CHANNELS)
    dit_vision_width: int = derived(VISION_WIDTH)
    dit_vision_tokens: int = derived(VISION_TOKENS)

    @property
    def sizes(self) -> VideoDiTSizes:
        """Return the sizes of ``--video-dit-size``, as changed by other flags and by the data."""
        named = SIZES[self.video_dit_size]
        channels = self.dit_channels or named.channels
        masked = self.dit_condition in I2V
        return dataclasses.replace(
            named,
            hidden_size=self.dit_hidden_size or named.hidden_size,
            num_heads=self.dit_num_heads or named.num_heads,
            ffn_size=self.dit_ffn_size or named.ffn_size,
            num_blocks=self.dit_num_blocks or named.num_blocks,
            channels=channels,
            text_width=self.dit_text_width or named.text_width,
            condition_channels=self.dit_mask_channels + channels if masked else 0,
            vision_width=self.dit_vision_width if self.dit_condition in CLIP else 0,
            vision_positions=self.num_vision if self.dit_condition == "flf2v-clip" else 0,
        )

    def with_sizes(self, sizes: VideoDiTSizes) -> VideoDiTConfig:
        """Return these flags with the values that give a network of ``sizes``.

        A name in `SIZES` is preferred to flags of single sizes. ``--dit-condition ti2v`` stays,
        since it does not change the sizes.
        """
        own = {size: getattr(sizes, size) for size in OWN_SIZES}
        name = name_of(sizes)
        condition = TI2V if self.dit_condition == TI2V else "none"
        if sizes.condition_channels:
            condition = "i2v-clip" if sizes.vision_width else "i2v"
        if sizes.vision_positions:
            condition = "flf2v-clip"
        flags: dict[str, Any] = {
            OWN_SIZES[size]: None if name else value for size, value in own.items()
        }
        masks = sizes.condition_channels - sizes.channels
        images = 2 if condition == "flf2v-clip" else 1
        return dataclasses.replace(
            self,
            video_dit_size=name or self.video_dit_size,
            **flags,
            dit_condition=condition,
            dit_channels=sizes.channels,
            dit_text_width=sizes.text_width,
            dit_mask_channels=masks if sizes.condition_channels else MASK_CHANNELS,
            dit_vision_width=sizes.vision_width or VISION_WIDTH,
            dit_vision_tokens=sizes.vision_positions // images or VISION_TOKENS,
        )

    @property
    def vision_places(self) -> tuple[str, ...]:
        """Return the frames whose vision tokens the network is given.

        They are words that `video.data.given_frames.image_embeds` takes.
        """
        return {"i2v-clip": ("first",), "flf2v-clip": ("head", "tail")}.get(self.dit_condition, ())

    @property
    def num_vision(self) -> int:
        """Return the number of vision tokens that the network is given for a clip."""
        return len(self.vision_places) * self.dit_vision_tokens

    @property
    def has_frame_timesteps(self) -> bool:
        """Return whether each frame has a timestep of its own, instead of one for all of a clip."""
        return self.independent_block_timesteps or self.dit_condition == TI2V
