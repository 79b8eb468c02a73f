"""Checks the flags of a video DiT, and derives other flags from them or from a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_ext.config.flags import spelling_of
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError, FlagError
from megatron_ext.video.config.rules import QK_NORMS, SHAPE_FLAGS
from megatron_ext.video.config.run import MODES, ConditionConfig, VideoConfig
from megatron_ext.video.config.sizes import model_of
from megatron_ext.video.config.window import stored_window
from megatron_ext.video.networks.network import STREAMING, Sections
from megatron_ext.video.networks.wan.config import (
    BIDIRECTIONAL,
    CAUSAL,
    OWN_SIZES,
    TI2V,
    VideoDiTConfig,
    is_causal,
)

_OWN_FLAGS = {
    "hidden_size": "`--dit-hidden-size`",
    "num_attention_heads": "`--dit-num-heads`",
}
"""The flags of a video DiT that have the place of general ones."""


def resolve(config: RunConfig) -> RunConfig:
    """Return the configuration with the sizes of ``--video-dit-size`` in its section ``model``."""
    fields = config.section(VideoDiTConfig).sizes.transformer_fields()
    return dataclasses.replace(config, model=model_of(fields, config.model))


_MODES = {TI2V: ("t2v", "i2v_head"), "flf2v-clip": ("i2v_loop",)}
"""Condition modes with a weight of 1 by default, by ``--dit-condition``; else the first frame's."""


def conditions(config: RunConfig) -> Mapping[str, Any] | None:
    """Return the defaults of the flags of condition modes, or None without ``--dit-condition``.

    A network that reads given frames as input channels still denoises these frames.
    """
    kind = config.section(VideoDiTConfig).dit_condition
    if kind == "none":
        return None
    usual = _MODES.get(kind, ("i2v_head",))
    weights = {f"{mode}_weight": float(mode in usual) for mode in MODES}
    return {**weights, "reference_loss": "masked" if kind == TI2V else "all"}


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
            f"leave it out, or give {_OWN_FLAGS[name]}",
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
    errors += _condition_errors(config)
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


def _condition_errors(config: RunConfig) -> list[FlagError]:
    """Return an error for each flag that does not go with ``--dit-condition``."""
    kind = config.section(VideoDiTConfig).dit_condition
    loss = config.section(ConditionConfig).reference_loss
    errors = []
    if kind != "none" and is_causal(config):
        errors.append(
            FlagError(
                "--dit-condition",
                kind,
                f"does not go with `--video-model {CAUSAL}`, which is given no frames",
                f"use `--video-model {BIDIRECTIONAL}`, or leave it out",
            )
        )
    if kind == TI2V and loss != "masked":
        errors.append(
            FlagError(
                "--reference-loss",
                loss,
                f"does not go with `--dit-condition {TI2V}`, whose given frames have no noise",
                "use masked",
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

    Raises:
        ConfigError: the checkpoint's network is given frames, which the new run's is not.
    """
    streaming = stored["streaming"]
    dit = stored["video_dit"]
    condition = dit.get("dit_condition", "none")
    if kind == BIDIRECTIONAL and condition != "none":
        raise ConfigError(
            f"The checkpoint is of a video DiT with `--dit-condition {condition}`, but this run "
            "builds one that is given no frames; start from a text-to-video network."
        )
    size = dit["video_dit_size"]
    flags = {name: dit.get(field) for name, field in OWN_SIZES.items()}
    sizes = {name: value for name, value in flags.items() if value is not None}
    channels = dit.get("dit_channels")
    if kind == STREAMING:
        size = streaming["generator_size"]
        channels = streaming["latent_channels"]
        sizes = streaming.get("generator_sizes") or {}
    causal = {STREAMING, CAUSAL}
    window = stored_window(stored) if kind in causal and builds in causal else {}
    if builds == STREAMING:
        named = {"generator_size": size, "generator_sizes": sizes or None}
        return {"streaming": {**named, "latent_channels": channels, **window}}
    own = {OWN_SIZES[name]: value for name, value in sizes.items()}
    return {"video_dit": {"video_dit_size": size, **own}, "streaming": window}
