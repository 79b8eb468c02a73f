"""What flags and data decide of the model of a video run, whichever it is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ConfigError

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
    """With the model for the latents and embeddings of a dataset.

    Raises:
        ConfigError: captions without pooled vectors, which the MMDiT needs.
    """
    if config.video.uses_dit:
        dit = dataclasses.replace(
            config.video_dit,
            dit_channels=manifest["latent_channels"],
            dit_text_width=manifest["text_width"],
        )
        return dataclasses.replace(config, video_dit=dit)
    if not manifest["pooled_width"]:
        raise ConfigError(
            f"`--video-data-path` ({config.video.video_data_path}) holds captions without pooled "
            "vectors, as umt5 gives them, but the MMDiT needs these; give `--video-model "
            "video-dit` or causal-video-dit, or encode the captions with t5-clip."
        )
    mmdit = dataclasses.replace(
        config.mmdit,
        channels=manifest["latent_channels"],
        caption_width=manifest["text_width"],
        pooled_caption_width=manifest["pooled_width"],
    )
    return dataclasses.replace(config, mmdit=mmdit)
