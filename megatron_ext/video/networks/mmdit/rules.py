"""Rules for the flags of an MMDiT: values derived from them, and errors in their use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_ext.config.flags import default_of
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError
from megatron_ext.video.config.sizes import model_of
from megatron_ext.video.networks.mmdit.config import MMDiTConfig
from megatron_ext.video.networks.network import Sections


def resolve(config: RunConfig) -> RunConfig:
    """Return the configuration with the section ``model`` filled in from the MMDiT's flags.

    Sizes that do not fit together raise ConfigError.
    """
    fields = config.section(MMDiTConfig).sizes(config.model).transformer_fields()
    return dataclasses.replace(config, model=model_of(fields, config.model))


def rules(config: RunConfig, resolved: RunConfig) -> list[FlagError]:
    """Return an error if ``--guidance`` is given without ``--guidance-embed``; else []."""
    mmdit = config.section(MMDiTConfig)
    if mmdit.guidance_embed or mmdit.guidance == default_of(mmdit, "guidance"):
        return []
    return [FlagError("--guidance", None, "needs `--guidance-embed`", "give both")]


def stored_model(stored: Mapping[str, Any], name: str) -> Sections:
    """Return the flags that describe a checkpoint's MMDiT, as ``{section: {field: value}}``.

    ``stored`` is the configuration in the checkpoint; ``name`` is not used.
    """
    # What else its model's section holds follows from these.
    names = ("hidden_size", "num_attention_heads")
    model = {name: stored["model"][name] for name in names}
    return {"model": model, "mmdit": dict(stored["mmdit"])}
