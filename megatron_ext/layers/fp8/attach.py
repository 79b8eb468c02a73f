"""Chooses the layers that multiply in 8 bits: the parallel linear layers in a model's blocks.

The embedding, the output head, norms, core attention, routers, adapters, modulation and the layers
of multi-token prediction stay in higher precision.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.config.precision import Fp8Config
from megatron_ext.config.rules.fp8 import UNIT
from megatron_ext.device.gpus import FP8
from megatron_ext.errors import ConfigError
from megatron_ext.layers.fp8.scaling import RECIPES, ExpertParts, Parts, WholeParts
from megatron_ext.layers.linear import ColumnParallelLinear, RowParallelLinear, WholeLinear

Layer = ColumnParallelLinear | RowParallelLinear | WholeLinear

_IN_A_LAYER = re.compile(r"^(?!mtp\.).*\b(layers|blocks|double_blocks|single_blocks)\.")
"""Matches names of modules and parameters in layers, but not in multi-token prediction."""


def attach_fp8(
    chunks: Sequence[torch.nn.Module],
    config: Fp8Config,
    pgs: ProcessGroupCollection,
    *,
    num_layers: int | None,
    on_gpu: bool,
    varies: bool,
) -> None:
    """Make the linear layers of this rank's model chunks multiply in 8 bits.

    Args:
        num_layers: number of layers of the whole model; it determines which first and last layers
            stay in bfloat16. None keeps no layer in bfloat16.
        on_gpu: whether the run uses a GPU; if so, check that the GPU can multiply 8-bit matrices.
        varies: whether a layer may get another number of tokens in each call; its kernels then
            serve all numbers, instead of being compiled for each one.

    Raises:
        ConfigError: the GPU has no 8-bit products, the model has no parallel linear layers, or a
            side of a weight is not divisible by 16.
    """
    if on_gpu:
        capability = torch.cuda.get_device_capability()
        if capability < FP8:
            raise ConfigError(
                f"`--fp8-format` needs a GPU of compute capability {FP8[0]}.{FP8[1]} or "
                f"above, but this one has {capability[0]}.{capability[1]}; leave it out."
            )
    for chunk in chunks:
        modules = dict(chunk.named_modules())
        in_bf16 = tuple(
            f"{name}."
            for name, module in modules.items()
            if isinstance(module, TransformerLayer)
            and num_layers is not None
            and config.keeps_bf16(module.layer_number, num_layers)
        )
        inside = [name for name in modules if _IN_A_LAYER.match(name)]
        layers = {name: x for name in inside if isinstance(x := modules[name], Layer)}
        for name, layer in layers.items():
            if not name.startswith(in_bf16):
                _attach(name, layer, config, pgs, varies=varies)
        if not layers and any(_IN_A_LAYER.match(name) for name, _ in chunk.named_parameters()):
            raise ConfigError(
                f"`--fp8-format` ({config.fp8_format}) changes the parallel linear layers of "
                "a model's layers, of which this model has none; leave it out."
            )


def _attach(
    name: str, layer: Layer, config: Fp8Config, pgs: ProcessGroupCollection, *, varies: bool
) -> None:
    if layer.weight.size(0) % UNIT or layer.weight.size(1) % UNIT:
        raise ConfigError(
            f"`--fp8-format` needs layers whose sides divide by {UNIT} on every rank, but those of "
            f"`{name}` are {tuple(layer.weight.shape)}; change its width or leave it out."
        )
    is_row = isinstance(layer, RowParallelLinear)
    kind: type[Parts] = ExpertParts if layer.is_expert else Parts
    parts = (WholeParts if isinstance(layer, WholeLinear) else kind)(
        pgs,
        cuts_input=is_row,
        cuts_sequence=not is_row and layer.sequence_parallel,
        # The number of an expert's tokens varies.
        varies=layer.is_expert or varies,
    )
    layer.fp8 = RECIPES[config.fp8_recipe](config, parts)
