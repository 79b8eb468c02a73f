"""Rules for the flags of HunyuanVideo: values derived from them, and errors in their use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError
from megatron_ext.video.config.joint import guidance_errors, stored_joint
from megatron_ext.video.config.sizes import model_of
from megatron_ext.video.networks.hunyuan.config import sizes_of
from megatron_ext.video.networks.network import Sections


def resolve(config: RunConfig) -> RunConfig:
    """Return the configuration with the section ``model`` filled in from HunyuanVideo's flags.

    Sizes that do not fit together raise ConfigError.
    """
    fields = sizes_of(config).transformer_fields()
    return dataclasses.replace(config, model=model_of(fields, config.model))


def rules(config: RunConfig, resolved: RunConfig) -> list[FlagError]:
    """Return an error if ``--guidance`` is given without ``--guidance-embed``; else []."""
    return guidance_errors(config)


def stored_model(stored: Mapping[str, Any], name: str) -> Sections:
    """Return the flags that describe a checkpoint's network, as ``{section: {field: value}}``.

    ``stored`` is the configuration in the checkpoint; ``name`` is not used.
    """
    return stored_joint(stored, "hunyuan")
