"""Checks the flags of a video DiT, and derives other flags from them or from a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_ext.config.flags import spelling_of
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError
from megatron_ext.video.config.rules import QK_NORMS, SHAPE_FLAGS
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.sizes import model_of
from megatron_ext.video.config.window import stored_window
from megatron_ext.video.networks.network import STREAMING, Sections
from megatron_ext.video.networks.wan.config import CAUSAL, VideoDiTConfig, is_causal


def resolve(config: RunConfig) -> RunConfig:
    """Return the configuration with the sizes of ``--video-dit-size`` in its section ``model``."""
    fields = config.section(VideoDiTConfig).sizes.transformer_fields()
    return dataclasses.replace(config, model=model_of(fields, config.model))


def rules(config: RunConfig, resolved: RunConfig) -> list[FlagError]:
    """Return an error for each given flag without effect on a video DiT.

    A size that ``--video-dit-size`` gives anyway, in ``resolved``, is accepted: printed
    configurations hold it.
    """
    model = f"`--video-model {config.section(VideoConfig).video_model}`"
    errors = [
        FlagError(
            spelling_of(config.model, name),
            None,
            f"has no effect with {model}: `--video-dit-size` decides",
            "leave it out",
        )
        for name in SHAPE_FLAGS
        if getattr(config.model, name) not in (None, getattr(resolved.model, name))
    ]
    if config.optimizer.apply_wd_to_qk_layernorm:
        errors.append(
            FlagError(
                "--apply-wd-to-qk-layernorm",
                None,
                f"has no effect with {model}: {QK_NORMS}",
                "leave it out",
            )
        )
    if config.section(VideoDiTConfig).independent_block_timesteps and not is_causal(config):
        errors.append(
            FlagError(
                "--independent-block-timesteps",
                None,
                "has an effect only with `--video-model causal-video-dit`, which has frame blocks",
                "leave it out",
            )
        )
    return errors


def stored_model(stored: Mapping[str, Any], name: str) -> Sections:
    """Return the flags that describe a checkpoint's video DiT, as ``{section: {field: value}}``.

    ``stored`` is the configuration in the checkpoint, ``name`` the ``--video-model`` of its run.
    """
    window = stored_window(stored) if name == CAUSAL else {}
    return {"video_dit": dict(stored["video_dit"]), "streaming": window, "lora": stored["lora"]}


def restated(stored: Mapping[str, Any], kind: str, builds: str) -> Sections:
    """Return the flags that a new run needs to start from a checkpoint, by section and field.

    ``kind`` is the checkpoint's network and ``builds`` the new run's: a ``--video-model``, or
    `STREAMING`. ``stored`` is the configuration in the checkpoint. The flags set its model size,
    its latent channels if ``builds`` is `STREAMING`, and its window if both networks are causal.
    """
    streaming = stored["streaming"]
    dit = stored["video_dit"]
    size = dit["video_dit_size"]
    channels = dit.get("dit_channels")
    if kind == STREAMING:
        size = streaming["generator_size"]
        channels = streaming["latent_channels"]
    causal = {STREAMING, CAUSAL}
    window = stored_window(stored) if kind in causal and builds in causal else {}
    if builds == STREAMING:
        return {"streaming": {"generator_size": size, "latent_channels": channels, **window}}
    return {"video_dit": {"video_dit_size": size}, "streaming": window}
