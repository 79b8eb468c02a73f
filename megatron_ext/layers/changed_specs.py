"""Layer specs that a user's function has changed, for all layers of a decoder or for some."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_ext.errors import ConfigError
from megatron_ext.layers.specs import layer_spec

ChangeLayers = Callable[[TransformerBlockSubmodules], TransformerBlockSubmodules]
"""A function from the specs of all layers of a decoder, and of the norm after them, to others."""


def changed_specs(
    transformer_config: TransformerConfig,
    change_layers: ChangeLayers,
    *,
    impl: str,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the specs of all layers of the decoder and of the final norm, as the user wants them.

    If the layers differ, ``transformer_config`` is told so: checkpoints then store the parameters
    of each layer under a name of its own, instead of those of all layers as one tensor.

    Raises:
        ConfigError: ``change_layers`` returns another number of layers.
    """
    block = layer_spec(transformer_config, impl=impl, vp_stage=vp_stage, all_layers=True)
    before = len(block.layer_specs)
    block = change_layers(block)
    layers = getattr(block, "layer_specs", [])
    if len(layers) != before:
        raise ConfigError(
            f"`change_layers` must return the specs of {before} layers, but returns "
            f"{len(layers)}; change the layers in its argument, and return that."
        )
    first = _contents(layers[0])
    if any(_contents(layer) != first for layer in layers[1:]):
        transformer_config.hetereogenous_dist_checkpoint = True
    return block


def _contents(part: Any) -> Any:
    """Return what a spec, or a part of one, builds, in a form that can be compared."""
    if isinstance(part, functools.partial):
        return part.func, _contents(part.args), _contents(part.keywords)
    if isinstance(part, ModuleSpec) or dataclasses.is_dataclass(part):
        return type(part), _contents(vars(part))
    if isinstance(part, Mapping):
        return {name: _contents(value) for name, value in part.items()}
    if isinstance(part, (list, tuple)):
        return [_contents(value) for value in part]
    return part
