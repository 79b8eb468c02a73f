"""The gated delta rule as a sequence mixer: gated DeltaNet and Kimi Delta Attention build on it.

The hidden states are projected to queries, keys and values of all heads, which a short convolution
and SiLU transform (see `short_convolution`). Queries and keys get unit length. The gated delta rule
gives the outputs (see `delta_rule`), which are normalized in each head, multiplied by a gate, and
projected back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.initialization import device_of
from megatron_ext.layers.mixers import state_passing
from megatron_ext.layers.mixers.delta_kernels import delta_rule
from megatron_ext.layers.mixers.delta_rule import step
from megatron_ext.layers.mixers.recurrent import RecurrentMixer

if TYPE_CHECKING:
    from megatron_ext.layers.mixers.state_cache import States

UNIT_EPSILON = 1e-6
"""Added to the squared length of queries and keys before they are divided by their length."""


@dataclass
class DeltaSubmodules:
    """The linear layers of a mixer: ``low_proj`` is whole on every tensor-parallel rank."""

    in_proj: Any
    out_proj: Any
    low_proj: Any = None


class Gates(NamedTuple):
    """The gates by which a token changes the state, and its own output.

    Attributes:
        decays: log decays ``[b, s, h]`` or ``[b, s, h, k]``, see `delta_rule.DeltaRule`.
        beta: ``[b, s, h]``.
        output: ``[b, s, h, v]``, the gate before its activation.
    """

    decays: Tensor
    beta: Tensor
    output: Tensor


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


class DeltaMixer(RecurrentMixer):
    """A sequence mixer whose states follow the gated delta rule.

    Subclasses set the projections and the gates.

    The channels of the short convolution are, for each head of keys, its query, key and values.

    Attributes:
        A_log, dt_bias: parameters of the log decays, see the subclasses.
    """

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
        super().__init__(config, layer_number, config.linear_conv_kernel_dim, pg_collection)
        self.key_size: int = config.linear_key_head_dim
        self.value_size: int = config.linear_value_head_dim
        self.all_key_heads: int = config.linear_num_key_heads
        self.all_heads: int = config.linear_num_value_heads
        self.key_heads = self.all_key_heads // self.tp_group.size()
        self.heads = self.all_heads // self.tp_group.size()
        self.group = self.all_heads // self.all_key_heads
        self.mixed_size = 2 * self.key_size + self.group * self.value_size
        """Channels of a head of keys that are convolved."""
        self.out_norm = GatedNorm(config, self.value_size, activation, self.tp_group)
        self.out_proj = self.row_linear(submodules.out_proj, self.all_heads * self.value_size)
        self.conv_weight = self.taps(self.key_heads * self.mixed_size)

    def parts(self, projected: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Split ``[b, s, c]`` into the inputs of the convolution, and those of `gates`.

        The first are ``[b, s, n, mixed_size]`` for this rank's n heads of keys.
        """
        raise NotImplementedError

    def gates(self, *inputs: Tensor) -> Gates:
        """Return the gates of tokens; the arguments are from `parts`."""
        raise NotImplementedError

    def mixed(self, projected: Tensor, documents: Tensor | None) -> Tensor:
        """Return the gated outputs of this rank's slices, ``[b, s, h * v]``."""
        inputs, rest = self.parts(projected)
        cut = self.cut(documents)
        heads = self._unit_heads(self.convolved(inputs.flatten(2), cut))
        gates = self.gates(*rest)
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

        See `RecurrentMixer.recur`; the states of the recurrence are ``[b, h, k, v]``.
        """
        inputs, rest = self.parts(projected)
        before, state = states or (None, None)
        convolved, known = self.continued(inputs.flatten(2), before)
        gates = self.gates(*rest)
        heads = self._unit_heads(convolved)
        if state is not None and projected.size(1) == 1:
            tokens = (x[:, 0] for x in (*heads, gates.decays, gates.beta))
            output, after = step(state, *tokens)
            output = output[:, None]
        else:
            output, after = delta_rule(*heads, gates.decays, gates.beta).outputs(state)
        return self.out_norm(output, gates.output).flatten(2), (known, after)

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


def unit(x: Tensor) -> Tensor:
    """Return vectors ``[..., k]`` divided by their lengths, in at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPSILON)
