"""Low-rank adapters on the parallel linear layers (LoRA, arXiv:2106.09685).

A layer ``y = W x`` becomes ``y = W x + scale * B A dropout(x)``. W is frozen; A ``[r, in]`` and B
``[out, r]`` are trained. A is split over the tensor-parallel ranks if the layer splits its input
features, B if it splits its output features. Only ``A x``, of width r, is communicated:

====================  ============  ============  =================================================
layer                 A             B             ``A x`` between the matrix products
====================  ============  ============  =================================================
column-parallel       whole         split (rows)  copied; all-gathered along s if sequence-parallel
row-parallel          split (cols)  whole         summed; reduce-scattered if sequence-parallel
without splits        whole         whole         kept
====================  ============  ============  =================================================

Under sequence parallelism, a rank's gradient of the unsplit matrix covers only its part of the
sequence. megatron-core sums it over the ranks, since the parameter is marked ``sequence_parallel``.
If the layer leaves communication to its caller, as an expert does to the token dispatcher, so does
the adapter: ``A x`` is kept, and the gradient of the unsplit matrix is summed over the ranks in its
backward pass. Gradients of A and B are never deferred.

Each routed expert has an A and a B of its own. Where a rank's experts are computed together, so are
their adapters (`Adapter.grouped`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    get_cuda_rng_tracker,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_ext.config.lora_targets import adapts, trains_whole
from megatron_ext.config.optimizer import ALL_TARGETS, LoraConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers.fused_rows import fused_rows
from megatron_ext.layers.initialization import Initialize, draw, memory_key, shards_of
from megatron_ext.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    WholeLinear,
    enter,
    leave,
)
from megatron_ext.layers.quantized import restore_weights, weight_of
from megatron_ext.layers.replicated_linear import ReplicatedLinear
from megatron_ext.parallel.collectives import largest_of_all_ranks

Layer = ColumnParallelLinear | RowParallelLinear | WholeLinear | ReplicatedLinear
_IN_A_LAYER = re.compile(r"(^|[._])(layers|blocks)\.")
"""Matches names of parameters that belong to layers, not to an embedding or output head."""


class Adapter(torch.nn.Module):
    """The matrices A and B that adapt a layer with weight ``[out/tp, in]`` or ``[out, in/tp]``.

    A `ReplicatedLinear` or `WholeLinear` has the weight ``[out, in]``. B starts at zero. The two
    halves of a gated layer's output are sharded separately. A layer calls its adapter with its own
    input and output, and returns the result.

    Args:
        gated: whether the layer's outputs are two halves, a gate and what it multiplies.
        rows: numbers of rows of the projections that the layer joins and that get an adapter each
            (`fused_rows`); a single number if the layer gets one.
    """

    groups = True
    """Whether the adapters of several experts can be computed together (`grouped`)."""

    def __init__(
        self, layer: Layer, config: LoraConfig, *, gated: bool, rows: Sequence[int]
    ) -> None:
        super().__init__()
        assert config.lora_rank is not None
        weight = layer.weight
        inner = len(rows) * config.lora_rank
        self.a = torch.nn.Parameter(weight.new_empty(inner, weight.size(1)))
        self.b = torch.nn.Parameter(weight.new_zeros(weight.size(0), config.lora_rank))
        self.scale = config.scale
        self.dropout = config.lora_dropout
        self.removed: Adapter | None = None
        """A frozen adapter whose term is subtracted, set by `layers.adapter_start`."""
        self.gated = gated
        self.tp_group = layer.tp_group
        self.sequence_parallel = layer.sequence_parallel
        self.is_row = isinstance(layer, RowParallelLinear)
        self.communicates = layer.communicates and not getattr(layer, "explicit_expert_comm", False)
        self.sides_cut = {"a": 1} if self.is_row else {"b": 0}
        if isinstance(layer, WholeLinear | ReplicatedLinear):
            self.communicates = False
            self.sides_cut = {}
        """The dimension along which matrix "a" or "b" is split; no entry for a whole matrix."""
        self.owner: Tensor | None
        """For each row of B, 1 at the projection to which it belongs, ``[out, projections]``."""
        self.register_buffer("owner", None, persistent=False)
        if len(rows) > 1:
            first = self.tp_group.rank() * weight.size(0) if self.sides_cut else 0
            places = torch.arange(first, first + weight.size(0), device=weight.device) % sum(rows)
            ends = torch.tensor(rows, device=weight.device).cumsum(0)
            owner = F.one_hot(torch.bucketize(places, ends, right=True), len(rows))
            self.owner = owner.to(weight.dtype)
        for name, _ in list(self.named_parameters()):
            self._mark(name, layer)

    def _mark_of_expert(self, parameter: torch.nn.Parameter, weight: Tensor) -> None:
        """Let an expert's matrix be summed over the ranks with copies of its weight.

        If those are other ranks than of dense layers, count a matrix that is whole on the
        expert-tensor-parallel ranks on the first of them alone in the gradient norm: megatron-core
        0.16 would count it by the rank among those that split dense layers.
        """
        among_experts = not getattr(weight, "allreduce", True)
        parameter.allreduce = not among_experts  # type: ignore[attr-defined]
        if among_experts and not getattr(parameter, "tensor_model_parallel", False):
            if self.tp_group.rank() == 0:
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            else:
                parameter.shared = True  # type: ignore[attr-defined]

    def _mark(self, name: str, layer: Layer) -> None:
        """Tell megatron-core how a parameter is split, or that its gradients may be partial."""
        parameter = getattr(self, name)
        if name in self.sides_cut:
            set_tensor_model_parallel_attributes(parameter, True, self.sides_cut[name], 1)
        elif self.communicates or not self.sides_cut:
            parameter.sequence_parallel = self.sequence_parallel
        if getattr(layer, "is_expert", False):
            self._mark_of_expert(parameter, layer.weight)

    def forward(self, layer: Layer, x: Tensor, output: Tensor) -> Tensor:
        """Return the output of the adapted layer, given the layer's input and own output."""
        del layer
        return self._kept(x, output) + self._term(self._dropped(x))

    def _kept(self, x: Tensor, output: Tensor) -> Tensor:
        """Return the layer's output without the part that the start has removed from its weight."""
        return output if self.removed is None else output - self.removed._term(x)

    def _dropped(self, x: Tensor) -> Tensor:
        """Return the layer's input on this rank after dropout."""
        # Under sequence parallelism, megatron-core's blocks already use each rank's own generator.
        draws_apart = self.is_row and self.dropout and not self.sequence_parallel
        with get_cuda_rng_tracker().fork() if draws_apart else nullcontext():
            return F.dropout(x, self.dropout, self.training)

    def _term(self, x: Tensor) -> Tensor:
        """Return ``scale * B A x``, to add to the layer's output; x is the input on this rank."""
        if not self.communicates:
            a = self._whole("a")
            return F.linear(F.linear(x, a) * self.scale, self._outputs(self._whole("b")))
        between = leave if self.is_row else enter
        low = between(F.linear(x, self.a), self.tp_group, self.sequence_parallel)
        return F.linear(low * self.scale, self._outputs(self.b))

    def grouped(
        self,
        adapters: Sequence[Adapter],
        x: Tensor,
        multiply: Callable[[Tensor, Sequence[Tensor]], Tensor],
    ) -> Tensor:
        """Return the term to add to the output of a rank's experts, ``[tokens, out]``.

        Args:
            adapters: those of all experts, in the order of their tokens in ``x`` ``[tokens, in]``.
            multiply: takes tokens and a matrix ``[out, in]`` for each expert, and returns the
                products of each expert's tokens.
        """
        term = self._grouped_term(adapters, F.dropout(x, self.dropout, self.training), multiply)
        if self.removed is None:
            return term
        removed: Any = [adapter.removed for adapter in adapters]
        return term - self.removed._grouped_term(removed, x, multiply)

    def _grouped_term(
        self,
        adapters: Sequence[Adapter],
        x: Tensor,
        multiply: Callable[[Tensor, Sequence[Tensor]], Tensor],
    ) -> Tensor:
        sides = {}
        for name in ("a", "b"):
            matrices = torch.stack([getattr(adapter, name) for adapter in adapters])
            if name not in self.sides_cut and self.tp_group.size() > 1:
                matrices = copy_to_tensor_model_parallel_region(matrices, group=self.tp_group)
            sides[name] = matrices.unbind()
        return multiply(multiply(x, sides["a"]) * self.scale, sides["b"])

    def _outputs(self, b: Tensor) -> Tensor:
        """Return B ``[out, r]`` as the matrix that multiplies the products with all rows of A.

        A row has zeros for the products of other projections than its own.
        """
        if self.owner is None:
            return b
        return (self.owner.unsqueeze(2) * b.unsqueeze(1)).flatten(1)

    def _whole(self, name: str) -> Tensor:
        """Return matrix "a" or "b"; if only the other is split, the ranks sum its gradient."""
        matrix: Tensor = getattr(self, name)
        if not self.sides_cut or name in self.sides_cut:
            return matrix
        return copy_to_tensor_model_parallel_region(matrix, group=self.tp_group)  # type: ignore[no-any-return]

    def delta(self) -> Tensor:
        """Return ``scale * B A`` in float32, split like the layer's weight.

        What the start has removed from the weight is subtracted.
        """
        own = self.scale * (self._outputs(self.b.float()) @ self.a.float())
        return own if self.removed is None else own - self.removed.delta()

    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight of the adapted layer in float32, given the layer's own weight."""
        return weight.float() + self.delta()

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the shards of A and B, under names that do not depend on the layout."""
        metadata = metadata or {}
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            dict(self.named_parameters(recurse=False)),
            prefix,
            self.sides_cut,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        singleton = metadata.get("singleton_local_shards", False)
        for name in (name for name, side in self.sides_cut.items() if self.gated and side == 0):
            entry = state[f"{prefix}{name}"]
            state[f"{prefix}{name}"] = apply_swiglu_sharded_factory(
                entry, sharded_offsets, singleton
            )
        if self.removed is not None:
            removed = self.removed.sharded_state_dict(
                f"{prefix}removed.", sharded_offsets, metadata
            )
            state.update(removed)
        return state


def attach_adapters(
    chunks: Sequence[torch.nn.Module], config: LoraConfig, seed: int, kind: type[Adapter] = Adapter
) -> None:
    """Freeze the model chunks of this rank and attach adapters to target layers of their blocks.

    What ``--lora-modules-to-save`` names is trained whole and not frozen.

    The initial A is kaiming-uniform, as in the authors' code, and the same on every layout. Other
    starts, and other kinds of adapters, are those of `layers.adapter_start`.

    All ranks call this together: a stage may have no layer that gets an adapter.

    Raises:
        ConfigError: the model has layers, but ``--lora-target-modules`` names none of them.
    """
    in_layers = adapted = False
    for chunk in chunks:
        fused = {}
        if config.lora_separate_projections:
            # A public projection of queries computes their gates, too.
            fused = dict(fused_rows(chunk, split_qkv=True, split_gates=False))
        for name, parameter in chunk.named_parameters():
            tied = "output_layer." in name and getattr(parameter, "shared_embedding", False)
            parameter.requires_grad_(trains_whole(config, name, tied=tied))
        for name, layer in list(chunk.named_modules()):
            own_name = name.rpartition(".")[2]
            in_a_layer = _IN_A_LAYER.search(name)
            if in_a_layer and isinstance(layer, Layer) and adapts(config, name):
                config_of_layer: Any = getattr(layer, "config", None)
                gated = own_name == "linear_fc1" and config_of_layer.gated_linear_unit
                rows = fused.get(layer.weight, (layer.weight.size(0),))
                if getattr(layer, "is_expert", False):
                    # As in peft, whose experts have one parameter for gate and up.
                    rows = (layer.weight.size(0),)
                layer.lora = kind(layer, config, gated=gated, rows=rows)
                if config.is_principal:
                    removed = Adapter(layer, config, gated=gated, rows=rows)
                    layer.lora.removed = removed.requires_grad_(False)
        matrices = [adapter.a for _, adapter in adapted_layers(chunk)]
        in_layers |= any(_IN_A_LAYER.search(name) for name, _ in chunk.named_parameters())
        adapted |= bool(matrices)
        uniform = partial(torch.nn.init.kaiming_uniform_, a=math.sqrt(5))
        draw_by_name(chunk, matrices, uniform, seed)
        embedding: Any = getattr(chunk, "embedding", None)
        if embedding is not None:
            # A backward pass must begin here for recomputed layers, and for a stage without layers.
            embedding.register_forward_hook(require_gradient)
    if largest_of_all_ranks([in_layers, adapted]) == [1, 0]:
        raise ConfigError(
            f"`--lora-target-modules` ({' '.join(config.lora_target_modules or ALL_TARGETS)}) "
            "names no linear layer of this model; give names that it has, or leave out "
            "`--lora-rank`."
        )


def require_gradient(_module: Any, _inputs: Any, output: Any) -> None:
    """Let the hidden states, an embedding's only or first output, need a gradient."""
    if torch.is_grad_enabled():
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        hidden.requires_grad_(True)


def adapted_layers(chunk: torch.nn.Module) -> Iterator[tuple[Layer, Adapter]]:
    """Yield each layer of a chunk that has an adapter, and its adapter."""
    for module in chunk.modules():
        if isinstance(module, Layer) and module.lora is not None:
            yield module, module.lora


def merged_weight_of(chunks: Sequence[torch.nn.Module]) -> dict[int, Callable[[], Tensor]]:
    """Return, for each weight with an adapter or in 4 bits, a function that computes its values.

    The keys are the Python ids of the weights. The merged weight (`Adapter.merged`) has W's dtype.
    """

    def merge(layer: Layer, adapter: Adapter) -> Tensor:
        with torch.no_grad():
            return adapter.merged(weight_of(layer)).to(layer.weight.dtype)

    values: dict[int, Callable[[], Tensor]] = {
        id(layer.weight): partial(weight_of, layer)
        for chunk in chunks
        for layer in chunk.modules()
        if getattr(layer, "quantized", None) is not None
    }
    for chunk in chunks:
        for layer, adapter in adapted_layers(chunk):
            values[id(layer.weight)] = partial(merge, layer, adapter)
    return values


@torch.no_grad()
def merge_adapters(chunks: Sequence[torch.nn.Module]) -> int:
    """Put the adapters into the weights and remove them; return the number of adapters.

    The merged weights (`Adapter.merged`) are computed in float32.
    """
    restore_weights(chunks)
    adapted = [pair for chunk in chunks for pair in adapted_layers(chunk)]
    for layer, adapter in adapted:
        layer.weight.copy_(adapter.merged(layer.weight))
        layer.lora = None
    return len(adapted)


@torch.no_grad()
def draw_by_name(
    chunk: torch.nn.Module, parameters: Sequence[Tensor], method: Initialize, seed: int
) -> None:
    """Draw the given parameters of an unwrapped chunk, seeded by their full tensors' names."""
    chosen = {memory_key(parameter) for parameter in parameters}
    for shard in shards_of(chunk):
        if memory_key(shard.tensor) in chosen:
            shard.tensor.copy_(shard.cut(draw(shard, method, seed, None)))
