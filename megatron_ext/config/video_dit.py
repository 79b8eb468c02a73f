"""Flags of flow matching with a video DiT, and what its sizes decide of the model's section."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ext.config.flags import flag
from megatron_ext.config.mmdit_sizes import EPSILON
from megatron_ext.config.video_dit_sizes import SIZES, VideoDiTSizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_ext.config.model import ModelConfig

CAUSAL = "causal-video-dit"
VIDEO_MODELS = ("mmdit", "video-dit", CAUSAL)
WINDOW = ("frame_block", "window_frames", "sink_frames")
"""Flags of streaming that say which frames a causal model sees."""


@dataclass(frozen=True)
class VideoDiTConfig:
    """The video DiT that ``--task flow`` trains, for streaming to start from.

    What it shares with the networks of streaming lies in `StreamingConfig`.

    Attributes:
        dit_channels, dit_text_width: of the data, which decides them.
    """

    video_dit_size: str = flag("tiny", "named size of the video DiT", choices=tuple(SIZES))
    independent_block_timesteps: bool = flag(
        False, "each frame block has a timestep of its own, as if it were streamed"
    )
    dit_channels: int | None = None
    dit_text_width: int | None = None

    @property
    def sizes(self) -> VideoDiTSizes:
        """The named size with the widths of the data."""
        named = SIZES[self.video_dit_size]
        return dataclasses.replace(
            named,
            channels=self.dit_channels or named.channels,
            text_width=self.dit_text_width or named.text_width,
        )


def described_by(sizes: VideoDiTSizes, model: ModelConfig) -> ModelConfig:
    """The model's section as it follows from sizes."""
    return dataclasses.replace(
        model,
        num_layers=sizes.num_blocks,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_heads,
        num_query_groups=None,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.ffn_size,
        norm_epsilon=EPSILON,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        untie_embeddings_and_output_weights=True,
        blocks_dealt_by_cost=True,
    )


def stored_dit(stored: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """What of a stored configuration describes a video DiT, by section; None of another model."""
    model = stored.get("video", {}).get("video_model", "mmdit")
    if model == "mmdit":
        return None
    window = {name: stored["streaming"][name] for name in WINDOW if model == CAUSAL}
    return {"video_dit": dict(stored["video_dit"]), "streaming": window}
