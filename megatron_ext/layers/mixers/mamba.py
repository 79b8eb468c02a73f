"""Mamba-2 (Dao and Gu, arXiv:2405.21060, section 7), as in Megatron-LM and Nemotron-H.

The hidden states are projected to a gate z, to inputs x, to B and C, and to the lengths dt of
steps. A short convolution and SiLU transform x, B and C (see `short_convolution`). The recurrence
of `state_space` gives the outputs of heads. They are multiplied by ``silu(z)``, normalized in each
group of heads, and projected back::

    a = -exp(A_log)
    dt = softplus(dt + dt_bias), within --mamba-time-step-min and --mamba-time-step-max
    output = RMSNorm(y silu(z))

Tensor parallelism splits the groups, so that each rank has whole ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.heads_norm import HeadsWeight, exact
from megatron_ext.layers.initialization import device_of
from megatron_ext.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ext.layers.mixers import state_passing, state_space
from megatron_ext.layers.mixers.recurrent import RecurrentMixer, decay_rate
from megatron_ext.layers.mixers.state_space_kernels import state_space as recurrence_of

if TYPE_CHECKING:
    from megatron_ext.layers.mixers.state_cache import States

FIRST_STEPS = (0.001, 0.1)
"""The shortest and the longest step that ``dt_bias`` alone gives at the start."""
SHORTEST_FIRST_STEP = 1e-4
"""The shortest one that Megatron-LM allows."""


@dataclass
class MambaSubmodules:
    """The linear layers of a mixer."""

    in_proj: Any
    out_proj: Any


class Projected(NamedTuple):
    """The outputs of ``in_proj`` for this rank's g groups of n / g heads.

    Attributes:
        gate: z, ``[b, s, g, n / g * p]``.
        mixed: inputs of the convolution, ``[b, s, c]``: for each group x, B and C.
        steps: dt before its bias, ``[b, s, n]``.
    """

    gate: Tensor
    mixed: Tensor
    steps: Tensor


class GatedNorm(HeadsWeight, torch.nn.Module):
    """RMSNorm of each group's outputs, after they are multiplied by ``silu`` of their gates.

    Args:
        size: number of channels on all ranks together, of which each rank has those of its groups.
    """

    def __init__(self, config: TransformerConfig, size: int, tp_group: ProcessGroup) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.tp_group = tp_group
        own = size // tp_group.size()
        self.weight = torch.nn.Parameter(
            torch.ones(own, dtype=config.params_dtype, device=device_of(config))
        )
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return ``[b, s, g * c]`` of ``x`` and ``gate``, both ``[b, s, g, c]``."""
        dtype = exact(x)
        gated = x.to(dtype) * F.silu(gate.to(dtype))
        normalized = F.rms_norm(gated, gated.shape[-1:], eps=self.eps).flatten(2)
        return (normalized * self.weight.to(dtype)).to(x.dtype)


class MambaMixer(RecurrentMixer):
    """The mixer of layers with the letter M.

    The rows of ``in_proj`` are those of each group in turn, so that tensor parallelism cuts them
    into contiguous parts: z and x of its heads, B, C, and dt of its heads. The channels of the
    short convolution are, for each group, x of its heads, B and C.

    Attributes:
        A_log, dt_bias, D: ``[n]``; D is the factor of x in the outputs.
    """

    NAME = "Mamba-2"

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config, layer_number, config.mamba_conv_kernel_dim, pg_collection)
        ranks = self.tp_group.size()
        self.head_dim: int = config.mamba_head_dim
        self.state_dim: int = config.mamba_state_dim
        longest = config.mamba_time_step_max
        self.limits = (config.mamba_time_step_min, math.inf if longest is None else longest)
        all_heads: int = config.mamba_num_heads
        all_groups: int = config.mamba_num_groups
        self.heads = all_heads // ranks
        self.groups = all_groups // ranks
        self.per_group = all_heads // all_groups
        self.group_size = self.per_group * self.head_dim
        """Channels of the heads of a group."""
        self.mixed_size = self.group_size + 2 * self.state_dim
        """Channels of a group that are convolved."""
        rows = all_groups * (self.group_size + self.mixed_size + self.per_group)
        self.in_proj = self.linear(submodules.in_proj, config.hidden_size, rows)
        states = (self.state_dim, self.state_dim)
        self.in_proj.matrix_rows = (self.group_size, self.group_size, *states, self.per_group)
        self.out_proj = self.row_linear(submodules.out_proj, all_heads * self.head_dim)
        self.out_norm = GatedNorm(config, all_heads * self.head_dim, self.tp_group)
        channels = self.groups * self.mixed_size
        self.conv_weight = self.taps(channels)
        if config.mamba_conv_bias:
            self.conv_bias = self.parameter(self.uniform, channels)
        self.dt_bias = self.parameter(draw_steps, self.heads)
        self.A_log = self.parameter(decay_rate, self.heads)
        self.D = self.parameter(torch.nn.init.ones_, self.heads)

    def projected(self, hidden: Tensor) -> Tensor:
        """Return ``[s, b, c]``, the rows of ``in_proj``."""
        output: Tensor = self.in_proj(hidden)[0]
        return output

    def parts(self, projected: Tensor) -> Projected:
        """Split the outputs of ``in_proj``, ``[b, s, c]``."""
        by_group = torch.unflatten(projected, -1, (self.groups, -1))
        sizes = [self.group_size, self.mixed_size, self.per_group]
        gate, mixed, steps = torch.split(by_group, sizes, dim=-1)
        return Projected(gate, mixed.flatten(2), steps.flatten(2))

    def mixed(self, projected: Tensor, documents: Tensor | None) -> Tensor:
        """Return the normalized outputs of this rank's slices, ``[b, s, n * p]``."""
        parts = self.parts(projected)
        cut = self.cut(documents)
        inputs = self.inputs(self.convolved(parts.mixed, cut), parts.steps)
        recurrence = recurrence_of(**inputs, segments=None if cut is None else cut.segments)
        state = None
        if self.cp_group.size() > 1:
            state = state_passing.initial_states(*recurrence.summary(), self.cp_group)
        y, _ = recurrence.outputs(state)
        return self._normalized(y, parts.gate)

    def recur(self, projected: Tensor, states: States | None) -> tuple[Tensor, States]:
        """Return the normalized outputs ``[b, s, n * p]`` of tokens, and the states after them.

        See `RecurrentMixer.recur`; the states of the recurrence are ``[b, n, k, p]``.
        """
        parts = self.parts(projected)
        before, state = states or (None, None)
        convolved, known = self.continued(parts.mixed, before)
        inputs = self.inputs(convolved, parts.steps)
        if state is not None and projected.size(1) == 1:
            now = {name: inputs[name][:, 0] for name in ("x", "dt", "b", "c")}
            y, after = state_space.step(**{**inputs, **now}, state=state)
            y = y[:, None]
        else:
            y, after = recurrence_of(**inputs).outputs(state)
        return self._normalized(y, parts.gate), (known, after)

    def inputs(self, convolved: Tensor, steps: Tensor) -> dict[str, Tensor]:
        """Return the arguments of `StateSpace`.

        ``convolved`` is ``[b, s, channels]``, and ``steps`` are dt before its bias, ``[b, s, n]``.
        """
        by_group = torch.unflatten(F.silu(convolved), -1, (self.groups, -1))
        sizes = [self.group_size, self.state_dim, self.state_dim]
        x, b, c = torch.split(by_group, sizes, dim=-1)
        return {
            "x": torch.unflatten(x.flatten(2), -1, (self.heads, self.head_dim)),
            "dt": state_space.time_steps(steps, self.dt_bias, self.limits),
            "a": -self.A_log.to(exact(self.A_log)).exp(),
            "b": b,
            "c": c,
            "d": self.D,
        }

    def _normalized(self, y: Tensor, gate: Tensor) -> Tensor:
        by_group = torch.unflatten(y.flatten(2), -1, (self.groups, -1))
        normalized: Tensor = self.out_norm(by_group, gate)
        return normalized


def draw_steps(bias: Tensor) -> Tensor:
    """Fill ``dt_bias``, as Megatron-LM does: lengths of steps whose logarithms are uniform."""
    low, high = (math.log(step) for step in FIRST_STEPS)
    steps = bias.uniform_(low, high).exp_().clamp_(min=SHORTEST_FIRST_STEP)
    # The inverse of softplus.
    return steps.add_(torch.log(-torch.expm1(-steps)))


def spec(transformer_config: TransformerConfig) -> ModuleSpec:
    """Return the spec of the mixer, with our linear layers."""
    linear = MambaSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return ModuleSpec(module=MambaMixer, submodules=linear)
