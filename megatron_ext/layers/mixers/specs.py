"""Finds the spec of a layer's sequence mixer by its letter in ``--hybrid-layer-pattern``."""

from __future__ import annotations

import importlib

from megatron.core.transformer import ModuleSpec, TransformerConfig

MODULES = {
    "M": "mamba",
    "G": "gated_delta_net",
    "K": "kimi_delta",
    "D": "sparse_attention",
}
"""The module of this package with the mixer of each letter; only models with one import it."""


def mixer_spec(letter: str, transformer_config: TransformerConfig) -> ModuleSpec:
    """Return the spec of the sequence mixer with this letter (see `config.layers.MIXERS`)."""
    module = importlib.import_module(f"megatron_ext.layers.mixers.{MODULES[letter]}")
    spec: ModuleSpec = module.spec(transformer_config)
    return spec
