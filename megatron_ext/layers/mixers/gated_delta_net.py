"""Gated DeltaNet (arXiv:2412.06464) as in Qwen3-Next: one decay for each head and token.

With the projections a and b of a token, the parameters ``A_log`` and ``dt_bias`` of a head, and the
rule of `delta_rule`::

    g = -exp(A_log) softplus(a + dt_bias)
    beta = sigmoid(b)
    output = RMSNorm(o) silu(z)

Several heads of values in a row may share a query and a key.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor

from megatron_ext.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ext.layers.mixers.delta_mixer import DeltaMixer, DeltaSubmodules, Gates
from megatron_ext.layers.mixers.recurrent import decay_rate


class GatedDeltaNet(DeltaMixer):
    """The mixer of layers with the letter G.

    The rows of ``in_proj`` are those of each head of keys in turn, so that tensor parallelism cuts
    them into contiguous parts: its query and key, its values, their output gates z, and their b and
    a. ``A_log`` and ``dt_bias`` have an entry for each head of values.
    """

    NAME = "gated DeltaNet"

    def __init__(
        self, config: TransformerConfig, submodules: DeltaSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, activation=F.silu, **kwargs)
        self.gate_size = self.group * self.value_size
        per_head = self.mixed_size + self.gate_size + 2 * self.group
        outputs = self.all_key_heads * per_head
        self.in_proj = self.linear(submodules.in_proj, config.hidden_size, outputs)
        sizes = [self.gate_size, self.gate_size, self.group, self.group]
        self.in_proj.matrix_rows = (self.key_size, self.key_size, *sizes)
        self.dt_bias = self.parameter(torch.nn.init.ones_, self.heads)
        self.A_log = self.parameter(decay_rate, self.heads)

    def projected(self, hidden: Tensor) -> Tensor:
        """Return ``[s, b, c]``, the rows of ``in_proj``."""
        output: Tensor = self.in_proj(hidden)[0]
        return output

    def parts(self, projected: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Split ``[b, s, c]``, see `DeltaMixer`."""
        by_head = torch.unflatten(projected, -1, (self.key_heads, -1))
        sizes = [self.mixed_size, self.gate_size, self.group, self.group]
        mixed, gate, beta, rise = torch.split(by_head, sizes, dim=-1)
        return mixed, (gate, beta, rise)

    def gates(self, gate: Tensor, beta: Tensor, rise: Tensor) -> Gates:  # type: ignore[override]
        """Return the gates of tokens, see `DeltaMixer`."""
        dtype = torch.promote_types(rise.dtype, torch.float32)
        rate = self.A_log.to(dtype).exp()
        steps = F.softplus(rise.flatten(2).to(dtype) + self.dt_bias.to(dtype))
        output = gate.reshape(*gate.shape[:2], self.heads, self.value_size)
        return Gates(-rate * steps, beta.flatten(2).to(dtype).sigmoid(), output)


def spec(transformer_config: TransformerConfig) -> ModuleSpec:
    """Return the spec of the mixer, with our linear layers."""
    linear = DeltaSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return ModuleSpec(module=GatedDeltaNet, submodules=linear)
