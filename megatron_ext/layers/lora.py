"""Low-rank adapters on the parallel linear layers (LoRA, arXiv:2106.09685).

A layer ``y = W x`` becomes ``y = W x + scale * B A dropout(x)``; W is frozen, and A ``[r, in]`` and
B ``[out, r]`` are trained. Each matrix is cut as the layer cuts its weight along the same side, so
that only the r-wide ``A x`` is communicated:

====================  ============  ============  =================================================
layer                 A             B             ``A x`` between the two products
====================  ============  ============  =================================================
column-parallel       whole         rows cut      copied; gathered along s under sequence parallel
row-parallel          columns cut   whole         summed; reduce-scattered along s under it
====================  ============  ============  =================================================

Under sequence parallelism the gradient of the whole matrix is a sum over a rank's part of the
sequence, which megatron-core completes where a parameter is marked ``sequence_parallel``.
Their gradients are not deferred.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_ext.config.optimizer import ALL_TARGETS, LoraConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers.initialization import draw_by_name
from megatron_ext.layers.linear import ColumnParallelLinear, RowParallelLinear, enter, leave

Layer = ColumnParallelLinear | RowParallelLinear
_IN_A_LAYER = re.compile(r"(^|\.)(layers|blocks)\.")
"""Matches names of a chunk's parameters, unless the chunk holds only the ends of a model."""


class Adapter(torch.nn.Module):
    """``scale * B A dropout(x)`` for a layer of weight ``[out/tp, in]`` or ``[out, in/tp]``.

    B starts at zero. A gated layer's output is two halves, each cut by itself.
    """

    def __init__(self, layer: Layer, config: LoraConfig, *, gated: bool) -> None:
        super().__init__()
        assert config.lora_rank is not None
        weight = layer.weight
        self.a = torch.nn.Parameter(weight.new_empty(config.lora_rank, weight.size(1)))
        self.b = torch.nn.Parameter(weight.new_zeros(weight.size(0), config.lora_rank))
        self.scale = config.scale
        self.dropout = config.lora_dropout
        self.gated = gated
        self.tp_group = layer.tp_group
        self.sequence_parallel = layer.sequence_parallel
        self.is_row = isinstance(layer, RowParallelLinear)
        self.sides_cut = {"a": 1} if self.is_row else {"b": 0}
        """The dimension along which a matrix is cut."""
        for name, parameter in self.named_parameters():
            if name in self.sides_cut:
                set_tensor_model_parallel_attributes(parameter, True, self.sides_cut[name], 1)
            else:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the layer's output, from the layer's input on this rank."""
        # Under sequence parallelism megatron-core's blocks draw from each rank's own generator.
        draws_apart = self.is_row and self.dropout and not self.sequence_parallel
        with get_cuda_rng_tracker().fork() if draws_apart else nullcontext():
            dropped = F.dropout(x, self.dropout, self.training)
        between = leave if self.is_row else enter
        low = between(F.linear(dropped, self.a), self.tp_group, self.sequence_parallel)
        return F.linear(low * self.scale, self.b)

    def delta(self) -> Tensor:
        """Return ``scale * B A`` in float32, cut as the layer's weight."""
        return self.scale * (self.b.float() @ self.a.float())

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the shards of A and B under names that no layout changes."""
        metadata = metadata or {}
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            self.sides_cut,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.gated:
            state[f"{prefix}b"] = apply_swiglu_sharded_factory(
                state[f"{prefix}b"], sharded_offsets, metadata.get("singleton_local_shards", False)
            )
        return state


def attach_adapters(chunks: Sequence[torch.nn.Module], config: LoraConfig, seed: int) -> None:
    """Freeze the model chunks of this rank and give their layers adapters.

    A is drawn by name, kaiming-uniform as in the authors' code.

    Raises:
        ConfigError: a chunk whose layers have none of the targets.
    """
    named = config.lora_target_modules
    targets: Sequence[str] = ALL_TARGETS if named is None else named
    for chunk in chunks:
        chunk.requires_grad_(False)
        for name, layer in list(chunk.named_modules()):
            own_name = name.rpartition(".")[2]
            if own_name in targets and isinstance(layer, Layer):
                gated = own_name == "linear_fc1" and layer.config.gated_linear_unit
                layer.lora = Adapter(layer, config, gated=gated)
        matrices = [adapter.a for _, adapter in _adapted(chunk)]
        if not matrices and any(_IN_A_LAYER.search(name) for name, _ in chunk.named_parameters()):
            raise ConfigError(
                f"`--lora-target-modules` ({' '.join(targets)}) names no linear "
                "layer of this model; give names that it has, or leave out `--lora-rank`."
            )
        uniform = partial(torch.nn.init.kaiming_uniform_, a=math.sqrt(5))
        draw_by_name(chunk, matrices, uniform, seed)
        embedding: Any = getattr(chunk, "embedding", None)
        if embedding is not None:
            # Recomputed layers, and the backward pass of a stage without layers, begin there.
            embedding.register_forward_hook(_require_gradient)


def _require_gradient(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_(True) if torch.is_grad_enabled() else output


def _adapted(chunk: torch.nn.Module) -> Iterator[tuple[Layer, Adapter]]:
    for module in chunk.modules():
        if isinstance(module, Layer) and module.lora is not None:
            yield module, module.lora


@torch.no_grad()
def merge_adapters(chunks: Sequence[torch.nn.Module]) -> int:
    """Take the adapters off, add ``scale * B A`` to the weights in float32; return their number."""
    adapted = [pair for chunk in chunks for pair in _adapted(chunk)]
    for layer, adapter in adapted:
        layer.weight.copy_(layer.weight.float() + adapter.delta())
        layer.lora = None
    return len(adapted)
