"""Kimi Delta Attention (arXiv:2510.26692): a decay for each channel of a key.

With the hidden state x of a token, the parameters ``A_log`` of a head and ``dt_bias`` of a channel,
and the rule of `delta_rule`::

    g = -exp(A_log) softplus(W_fb W_fa x + dt_bias)
    beta = sigmoid(W_b x)
    output = RMSNorm(o) sigmoid(W_gb W_ga x)

Each head has its own query, key and value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor

from megatron_ext.layers.linear import ColumnParallelLinear, RowParallelLinear, WholeLinear
from megatron_ext.layers.mixers.delta_mixer import DeltaMixer, DeltaSubmodules, Gates
from megatron_ext.layers.mixers.recurrent import decay_rate


class KimiDeltaAttention(DeltaMixer):
    """The mixer of layers with the letter K.

    The rows of ``in_proj`` are those of each head in turn, so that tensor parallelism cuts them
    into contiguous parts: its query, key, value and beta. The low-rank projections of the decays
    (``f_a_proj``, ``f_b_proj``) and of the output gate (``g_a_proj``, ``g_b_proj``) have the size
    of a head between them. ``A_log`` has an entry for each head, ``dt_bias`` for each channel of
    its key.
    """

    NAME = "Kimi Delta Attention"

    def __init__(
        self, config: TransformerConfig, submodules: DeltaSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, activation=torch.sigmoid, **kwargs)
        hidden = config.hidden_size
        keys = self.all_heads * self.key_size
        values = self.all_heads * self.value_size
        linear = submodules.in_proj
        low = submodules.low_proj
        self.in_proj = self.linear(linear, hidden, self.all_heads * (self.mixed_size + 1))
        self.in_proj.matrix_rows = (self.key_size, self.key_size, self.value_size, 1)
        self.f_a_proj = self.linear(low, hidden, self.value_size)
        self.f_b_proj = self.linear(linear, self.value_size, keys)
        self.g_a_proj = self.linear(low, hidden, self.value_size)
        self.g_b_proj = self.linear(linear, self.value_size, values)
        self.dt_bias = self.parameter(torch.nn.init.ones_, self.heads * self.key_size)
        self.A_log = self.parameter(decay_rate, self.heads)

    def projected(self, hidden: Tensor) -> Tensor:
        """Return ``[s, b, c]``: the rows of ``in_proj``, ``f_b_proj`` and ``g_b_proj``."""
        mixed, _ = self.in_proj(hidden)
        decays, _ = self.f_b_proj(self.f_a_proj(hidden)[0])
        gate, _ = self.g_b_proj(self.g_a_proj(hidden)[0])
        return torch.cat((mixed, decays, gate), dim=-1)

    def parts(self, projected: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Split ``[b, s, c]``, see `DeltaMixer`."""
        keys = self.heads * self.key_size
        values = self.heads * self.value_size
        rows = self.heads * (self.mixed_size + 1)
        by_head, rise, gate = torch.split(projected, [rows, keys, values], dim=-1)
        by_head = torch.unflatten(by_head, -1, (self.heads, -1))
        mixed, beta = torch.split(by_head, [self.mixed_size, 1], dim=-1)
        return mixed, (rise, beta, gate)

    def gates(self, rise: Tensor, beta: Tensor, gate: Tensor) -> Gates:  # type: ignore[override]
        """Return the gates of tokens, see `DeltaMixer`."""
        dtype = torch.promote_types(rise.dtype, torch.float32)
        rate = self.A_log.to(dtype).exp()[:, None]
        steps = F.softplus(rise.to(dtype) + self.dt_bias.to(dtype))
        decays = -rate * torch.unflatten(steps, -1, (self.heads, self.key_size))
        output = torch.unflatten(gate, -1, (self.heads, self.value_size))
        return Gates(decays, beta.squeeze(-1).to(dtype).sigmoid(), output)


def spec(transformer_config: TransformerConfig) -> ModuleSpec:
    """Return the spec of the mixer, with our linear layers.

    ``linear_num_key_heads`` and ``linear_num_value_heads`` must be equal.
    """
    linear = DeltaSubmodules(
        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear, low_proj=WholeLinear
    )
    return ModuleSpec(module=KimiDeltaAttention, submodules=linear)
