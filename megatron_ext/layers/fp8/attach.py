"""Which layers of a model multiply in 8 bits: the parallel linear ones of its layers or blocks.

The embedding, the output head, norms, attention itself, routers, adapters, the modulation of video
models and the depths of multi-token prediction do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.config.rules.fp8 import UNIT
from megatron_ext.device.rates import FP8
from megatron_ext.errors import ConfigError
from megatron_ext.layers.fp8.scaling import RECIPES, ExpertParts, Parts
from megatron_ext.layers.linear import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

Layer = ColumnParallelLinear | RowParallelLinear

_OF_A_LAYER = re.compile(r"^(?!mtp\.).*\b(layers|blocks|double_blocks|single_blocks)\.")
"""Names within the layers of a model, but for the depths of multi-token prediction."""


def attach_fp8(
    chunks: Sequence[torch.nn.Module], config: RunConfig, pgs: ProcessGroupCollection
) -> None:
    """Give the linear layers of this rank's model chunks 8-bit products.

    Args:
        chunks: without wrappers.
        config: with ``--fp8-format``.
        pgs: groups of this rank.

    Raises:
        ConfigError: a GPU without such products, a model without such layers, or a layer whose
            sides they cannot have.
    """
    if config.device == "cuda":
        _check_gpu()
    for chunk in chunks:
        in_bf16 = _layers_in_bf16(chunk, config)
        layers = {
            name: module
            for name, module in chunk.named_modules()
            if isinstance(module, Layer) and _OF_A_LAYER.match(name)
        }
        for name, layer in layers.items():
            if not name.startswith(in_bf16):
                _attach(name, layer, config, pgs)
        if not layers and any(_OF_A_LAYER.match(name) for name, _ in chunk.named_parameters()):
            raise ConfigError(
                f"`--fp8-format` ({config.fp8.fp8_format}) changes the parallel linear layers of "
                "a model's layers, of which this model has none; leave it out."
            )


def _layers_in_bf16(chunk: torch.nn.Module, config: RunConfig) -> tuple[str, ...]:
    """Beginnings of the names of what `--first-last-layers-bf16` leaves as it is."""
    num_layers = config.model.num_layers
    return tuple(
        f"{name}."
        for name, module in chunk.named_modules()
        if isinstance(module, TransformerLayer)
        and num_layers is not None
        and config.fp8.keeps_bf16(module.layer_number, num_layers)
    )


def _attach(name: str, layer: Layer, config: RunConfig, pgs: ProcessGroupCollection) -> None:
    if layer.weight.size(0) % UNIT or layer.weight.size(1) % UNIT:
        raise ConfigError(
            f"`--fp8-format` needs layers whose sides divide by {UNIT} on every rank, but those of "
            f"`{name}` are {tuple(layer.weight.shape)}; change its width or leave it out."
        )
    is_row = isinstance(layer, RowParallelLinear)
    parts = (ExpertParts if layer.is_expert else Parts)(
        pgs,
        cuts_input=is_row,
        cuts_sequence=not is_row and layer.sequence_parallel,
        # Experts get any number of tokens, and clips have many sizes.
        varies=layer.is_expert or config.video.video,
    )
    layer.fp8 = RECIPES[config.fp8.fp8_recipe](config.fp8, parts)


def _check_gpu() -> None:
    found = torch.cuda.get_device_capability()
    if found < FP8:
        raise ConfigError(
            f"`--fp8-format` needs a GPU of compute capability {FP8[0]}.{FP8[1]} or "
            f"above, but this one has {found[0]}.{found[1]}; leave it out."
        )
