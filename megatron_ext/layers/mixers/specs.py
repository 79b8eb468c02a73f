"""Finds the spec of a layer's sequence mixer by its letter in ``--hybrid-layer-pattern``."""

from __future__ import annotations

import importlib

from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

MODULES = {
    "M": "mamba",
    "G": "gated_delta_net",
    "K": "kimi_delta",
    "D": "sparse_attention",
}
"""The module of this package with the mixer of each letter; only models with one import it."""


def mixer_spec(
    letter: str, transformer_config: TransformerConfig
) -> tuple[ModuleSpec, dict[str, str]]:
    """Return the spec of the sequence mixer with this letter (see `config.layers.MIXERS`).

    Return with it the prefixes of parameters whose names in sharded checkpoints differ from those
    in the layer, each with the prefix there.
    """
    module = importlib.import_module(f"megatron_ext.layers.mixers.{MODULES[letter]}")
    spec: ModuleSpec = module.spec(transformer_config)
    # megatron-core's multi-token prediction asks for it.
    spec.params = {**spec.params, "attn_mask_type": AttnMaskType.causal}
    return spec, dict(getattr(module, "CHECKPOINT_NAMES", {}))
