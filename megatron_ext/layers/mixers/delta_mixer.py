"""What gated DeltaNet and Kimi Delta Attention share: all but their projections and gates.

The hidden states are projected to queries, keys and values of all heads, which a short convolution
and SiLU transform (see `short_convolution`). Queries and keys get unit length. The gated delta rule
gives the outputs (see `delta_rule`), which are normalized in each head, multiplied by a gate, and
projected back.

Tensor parallelism splits the heads. Under context parallelism each slice of the sequence starts
from the state that the slices before it leave (see `state_passing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig, build_module
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.initialization import Initialize, initialize_split
from megatron_ext.layers.masks import newest
from megatron_ext.layers.mixers import state_passing
from megatron_ext.layers.mixers.delta_kernels import delta_rule
from megatron_ext.layers.mixers.delta_rule import step
from megatron_ext.layers.mixers.documents import documents_of_mask
from megatron_ext.layers.mixers.short_convolution import short_convolution
from megatron_ext.layers.transformer_layer import WithBias

if TYPE_CHECKING:
    from megatron_ext.layers.kv_cache import KeyValueCache
    from megatron_ext.layers.mixers.state_cache import StateCache, States

UNIT_EPSILON = 1e-6
"""Added to the squared length of queries and keys before they are divided by their length."""


@dataclass
class DeltaSubmodules:
    """The linear layers of a mixer: ``low_proj`` is whole on every tensor-parallel rank."""

    in_proj: Any
    out_proj: Any
    low_proj: Any = None


class Gates(NamedTuple):
    """What a token does to the state, and to its own output.

    Attributes:
        decays: log decays ``[b, s, h]`` or ``[b, s, h, k]``, see `delta_rule.DeltaRule`.
        beta: ``[b, s, h]``.
        output: ``[b, s, h, v]``, the gate before its activation.
    """

    decays: Tensor
    beta: Tensor
    output: Tensor


class _Documents(NamedTuple):
    """Where documents begin in the slices of a rank, see `state_passing`."""

    own: Tensor
    before: Tensor
    segments: Tensor


class GatedNorm(torch.nn.Module):
    """RMSNorm of each head's output, times its gate after an activation.

    The weight is shared by all heads, and so whole on every tensor-parallel rank, each of which
    normalizes its own heads. Its gradient is summed over these ranks in the backward pass.
    """

    def __init__(
        self,
        config: TransformerConfig,
        size: int,
        activation: Callable[[Tensor], Tensor],
        tp_group: ProcessGroup,
    ) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.activation = activation
        self.tp_group = tp_group
        self.weight = torch.nn.Parameter(
            torch.ones(size, dtype=config.params_dtype, device=device_of(config))
        )

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return ``[..., h, v]``, normalized and gated, in the dtype of ``x``."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp_group).to(dtype)
        normalized = F.rms_norm(x.to(dtype), x.shape[-1:], weight, self.eps)
        return (normalized * self.activation(gate.to(dtype))).to(x.dtype)


class DeltaMixer(MegatronModule):  # type: ignore[misc]
    """A sequence mixer whose states follow the gated delta rule.

    Subclasses set the projections and the gates.

    Attributes:
        conv_weight: weight of the short convolution, ``[channels, w]`` of this rank's heads; for
            each head of keys, the channels are its query, key and values.
        A_log, dt_bias: parameters of the log decays, see the subclasses.
        cache: the states of earlier tokens, in generation; else None.
    """

    NAME = ""
    cache: StateCache | None = None

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        activation: Callable[[Tensor], Tensor],
        **_unused: Any,
    ) -> None:
        super().__init__(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.layer_number = layer_number
        self.tp_group = groups.tp
        self.cp_group = groups.cp
        self.key_size: int = config.linear_key_head_dim
        self.value_size: int = config.linear_value_head_dim
        self.width: int = config.linear_conv_kernel_dim
        self.all_key_heads: int = config.linear_num_key_heads
        self.all_heads: int = config.linear_num_value_heads
        self.key_heads = self.all_key_heads // self.tp_group.size()
        self.heads = self.all_heads // self.tp_group.size()
        self.group = self.all_heads // self.all_key_heads
        self.mixed_size = 2 * self.key_size + self.group * self.value_size
        """Channels of a head of keys that are convolved."""
        self.out_norm = GatedNorm(config, self.value_size, activation, self.tp_group)
        self.out_proj = build_module(
            submodules.out_proj,
            self.all_heads * self.value_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )
        bound = self.width**-0.5
        uniform = partial(torch.nn.init.uniform_, a=-bound, b=bound)
        self.conv_weight = self._parameter(uniform, self.key_heads * self.mixed_size, self.width)
        self.conv_weight.is_table = True  # type: ignore[attr-defined]

    def _column_linear(self, kind: Any, inputs: int, outputs: int) -> Any:
        """Return a linear layer without bias, the last axis of whose output the ranks split."""
        return build_module(
            kind,
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def _parameter(self, method: Initialize, *shape: int) -> torch.nn.Parameter:
        """Return a parameter of this shape, whose first axis the ranks split."""
        values = torch.empty(shape, dtype=self.config.params_dtype, device=device_of(self.config))
        parameter = torch.nn.Parameter(values)
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        initialize_split(parameter, method, self.config, self.tp_group)
        return parameter

    def projected(self, hidden: Tensor) -> Tensor:
        """Return ``[s, b, c]``, all that the mixer reads of the hidden states ``[s, b, h]``.

        Under sequence parallelism the hidden states are ``[s/tp, b, h]``.
        """
        raise NotImplementedError

    def parts(self, projected: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Split ``[b, s, c]`` into the inputs of the convolution, and those of `gates`.

        The first are ``[b, s, n, mixed_size]`` for this rank's n heads of keys.
        """
        raise NotImplementedError

    def gates(self, *inputs: Tensor) -> Gates:
        """Return the gates of tokens; the arguments are from `parts`."""
        raise NotImplementedError

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_unused: Any
    ) -> WithBias:
        """Return the output ``[s, b, h]``, and None or a bias that the caller must add.

        Under sequence parallelism input and output are ``[s/tp, b, h]``.

        Args:
            attention_mask: documents or a dense mask, see `layers.masks`; None means one document.

        Raises:
            ConfigError: the mask is dense, and not causal.
        """
        projected = self.projected(hidden_states)
        if self.cache is not None:
            mixed = self.cache.run(projected, self.recur)
        else:
            group = self.cp_group
            documents = documents_of_mask(attention_mask, self.NAME)
            rows = self._mixed_slices(state_passing.slices(projected, group), documents)
            mixed = state_passing.joined(rows, group)
        output: WithBias = self.out_proj(mixed)
        return output

    def _mixed_slices(self, projected: Tensor, documents: Tensor | None) -> Tensor:
        """Return the gated outputs of this rank's slices, ``[b, s, h * v]`` for ``[b, s, c]``."""
        inputs, rest = self.parts(projected)
        inputs = inputs.flatten(2)
        cut = None if documents is None else self._cut(documents)
        before = None
        if self.cp_group.size() > 1:
            before = state_passing.inputs_before(inputs, self.width - 1, self.cp_group)
        convolved = short_convolution(
            inputs,
            self.conv_weight,
            documents=None if cut is None else cut.own,
            before=before,
            documents_before=None if cut is None or before is None else cut.before,
        )
        gates = self.gates(*rest)
        heads = self._unit_heads(convolved)
        segments = None if cut is None else cut.segments
        rule = delta_rule(*heads, gates.decays, gates.beta, segments)
        state = None
        if self.cp_group.size() > 1:
            state = state_passing.initial_states(*rule.summary(), self.cp_group, torch.matmul)
        output, _ = rule.outputs(state)
        normalized: Tensor = self.out_norm(output, gates.output)
        return normalized.flatten(2)

    def recur(self, projected: Tensor, states: States | None) -> tuple[Tensor, States]:
        """Return the gated outputs ``[b, s, h * v]`` of s tokens, and the states after them.

        Args:
            projected: ``[b, s, c]``.
            states: the last inputs of the convolution ``[b, w - 1, channels]``, and the states
                ``[b, h, k, v]``, before these tokens; None at the beginning of sequences.
        """
        inputs, rest = self.parts(projected)
        inputs = inputs.flatten(2)
        before, state = states or (
            inputs.new_zeros(len(inputs), self.width - 1, inputs.size(2)),
            None,
        )
        convolved = short_convolution(inputs, self.conv_weight, before=before)
        known = torch.cat((before, inputs), dim=1)[:, inputs.size(1) :]
        gates = self.gates(*rest)
        heads = self._unit_heads(convolved)
        if state is not None and projected.size(1) == 1:
            tokens = (x[:, 0] for x in (*heads, gates.decays, gates.beta))
            output, after = step(state, *tokens)
            output = output[:, None]
        else:
            output, after = delta_rule(*heads, gates.decays, gates.beta).outputs(state)
        return self.out_norm(output, gates.output).flatten(2), (known, after)

    def _cut(self, documents: Tensor) -> _Documents:
        """Return where the documents ``[b, cp * s]`` begin in this rank's slices."""
        group = self.cp_group
        reach = self.width - 1

        def made() -> _Documents:
            return _Documents(
                state_passing.documents_of_slices(documents, group),
                state_passing.documents_before(documents, reach, group),
                state_passing.segments_of_slices(documents, group),
            )

        return newest.find(documents, ("slices", group.rank(), group.size(), reach), made)

    def _unit_heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys ``[b, s, n, k]`` and values ``[b, s, h, v]``.

        Queries and keys have unit length, and at least float32.
        """
        shape = (self.key_heads, self.mixed_size)
        channels = torch.unflatten(F.silu(convolved), -1, shape)
        query, key, value = torch.split(
            channels, [self.key_size, self.key_size, self.group * self.value_size], dim=-1
        )
        value = value.reshape(*value.shape[:2], self.heads, self.value_size)
        return unit(query), unit(key), value

    def new_cache(self, cache: KeyValueCache) -> StateCache:
        """Return an empty cache of this layer; ``cache`` is the state that all layers share."""
        from megatron_ext.layers.mixers.state_cache import StateCache

        return StateCache(cache)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded state; tensor-parallel ranks split the heads."""
        own = dict(self.named_parameters(recurse=False))
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state


def unit(x: Tensor) -> Tensor:
    """Return vectors ``[..., k]`` divided by their lengths, in at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPSILON)


def decay_rate(draws: Tensor) -> Tensor:
    """Fill ``A_log`` with logarithms of numbers between 1 and 16, as Megatron-LM does."""
    return draws.uniform_(1, 16).log_()


def device_of(config: TransformerConfig) -> Any:
    """Return the device on which parameters are created."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
