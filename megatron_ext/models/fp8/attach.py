"""Which layers of a model multiply in 8 bits: the linear ones of its transformer layers.

The embedding, the output head, norms, attention itself, routers and the depths of multi-token
prediction do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.errors import ConfigError
from megatron_ext.models.fp8.scaling import RECIPES, Parts
from megatron_ext.models.linear import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig

CAPABILITY = (8, 9)
"""Of the first NVIDIA GPUs with 8-bit products, Ada and Hopper."""

_DEPTHS = "mtp."
_OF_A_LAYER = re.compile(r"^(?!mtp\.).*\b(layers|blocks)\.")


def attach_fp8(
    chunks: Sequence[torch.nn.Module], config: RunConfig, pgs: ProcessGroupCollection
) -> None:
    """Give the linear layers of this rank's model chunks 8-bit products.

    Args:
        chunks: without wrappers.
        config: with ``--fp8-format``.
        pgs: groups of this rank.

    Raises:
        ConfigError: a GPU without such products, or a model without such layers.
    """
    if config.device == "cuda":
        _check_gpu()
    for chunk in chunks:
        layers = [
            module
            for name, module in chunk.named_modules()
            if isinstance(module, TransformerLayer) and not name.startswith(_DEPTHS)
        ]
        for layer in layers:
            _attach(layer, config, pgs)
        if not layers and any(_OF_A_LAYER.match(name) for name, _ in chunk.named_parameters()):
            raise ConfigError(
                f"`--fp8-format` ({config.fp8.fp8_format}) changes the linear layers of "
                "megatron-core's TransformerLayer, of which this model has none; leave it out."
            )


def _attach(layer: TransformerLayer, config: RunConfig, pgs: ProcessGroupCollection) -> None:
    fp8, num_layers = config.fp8, config.model.num_layers
    assert num_layers is not None
    if fp8.keeps_bf16(layer.layer_number, num_layers):
        return
    for module in layer.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            is_row = isinstance(module, RowParallelLinear)
            cut = not is_row and module.sequence_parallel
            parts = Parts(pgs, cuts_input=is_row, cuts_sequence=cut)
            module.fp8 = RECIPES[fp8.fp8_recipe](fp8, parts)


def _check_gpu() -> None:
    found = torch.cuda.get_device_capability()
    if found < CAPABILITY:
        raise ConfigError(
            f"`--fp8-format` needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or "
            f"above, but this one has {found[0]}.{found[1]}; leave it out."
        )
