"""What flags and data decide of the model of a video run, whichever it is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_ext.config import RunConfig


def patch_size_of(config: RunConfig) -> int:
    """p; a token is a square of so many latent cells a side."""
    if config.video.uses_dit:
        return config.video_dit.sizes.patch_size
    return config.mmdit.sizes(config.model).patch_size


def sequence_multiple(config: RunConfig) -> int:
    """What the tokens of text and image together must be a multiple of, so that ranks share them.

    A video DiT shares the tokens of each frame instead, and its text is whole on every rank.
    """
    if config.video.uses_dit:
        return 1
    return sharing_ranks(config)


def sharing_ranks(config: RunConfig) -> int:
    """Ranks that share the tokens of a clip."""
    parallel = config.parallel
    shared = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return parallel.context_parallel_size * shared


def with_widths(config: RunConfig, manifest: Mapping[str, Any]) -> RunConfig:
    """With the model for the latents and embeddings of a dataset."""
    if config.video.uses_dit:
        dit = dataclasses.replace(
            config.video_dit,
            dit_channels=manifest["latent_channels"],
            dit_text_width=manifest["text_width"],
        )
        return dataclasses.replace(config, video_dit=dit)
    mmdit = dataclasses.replace(
        config.mmdit,
        channels=manifest["latent_channels"],
        caption_width=manifest["text_width"],
        pooled_caption_width=manifest["pooled_width"],
    )
    return dataclasses.replace(config, mmdit=mmdit)
