"""The block of a Wan network: self-attention, attention to the text, feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.layers import sdpa
from megatron_ext.layers.pointwise import LayerNorm, activated, spec_of, weights_of
from megatron_ext.video.model.linear import column, column_of_whole, heads_of, mark_replicated, row
from megatron_ext.video.model.rotary import Table
from megatron_ext.video.model.tokens import parts_first
from megatron_ext.video.model.wan.attention import AttentionPlan, FrameAttention, KeyValue
from megatron_ext.video.model.wan.cache import CachePass
from megatron_ext.video.model.wan.inputs import Conditioning
from megatron_ext.video.model.wan.options import VideoDiTOptions
from megatron_ext.video.model.wan.pointwise import (
    FullWidthRMSNorm,
    ModulationTable,
    added_and_modulated,
    gated,
    gated_and_normed,
    heads,
    residual_and_modulated,
    squares_of_heads,
    summed,
)

WithBias = tuple[Tensor, Tensor]
"""The output of a linear layer, and the bias that is to be added to it."""


@dataclass(frozen=True)
class Run:
    """Everything that all blocks share in one forward pass.

    Attributes:
        num_frames: t.
        parts: tensor-parallel ranks that share out the sequence.
        table: rotary table of the slice's tokens.
        plan: which frames see which.
        cached: pass over the cache, None without one.
        text: keys and values of the text by block, to read and to fill; None computes them, so that
            they get gradients.
    """

    num_frames: int
    parts: int
    table: Table
    plan: AttentionPlan
    cached: CachePass | None
    text: dict[int, KeyValue] | None


class SelfAttention(MegatronModule):  # type: ignore[misc]
    """Attention over the frames that the window, if there is one, lets each frame see."""

    def __init__(
        self, config: TransformerConfig, options: VideoDiTOptions, groups: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        h, tp = config.hidden_size, groups.tp
        self.tp_group = tp
        self.linear_qkv = column(config, tp, h, h, projections=3)
        self.q_norm = FullWidthRMSNorm(config, tp)
        self.k_norm = FullWidthRMSNorm(config, tp)
        self.linear_proj = row(config, tp, h, h)
        self.attention = FrameAttention(groups.cp, trades_heads=options.cp_comm_type == "a2a")

    def forward(self, x: Tensor, number: int, run: Run) -> WithBias:
        """Return ``[s, b, h]`` and a bias to add for ``[s, b, h]``, in block ``number``."""
        fused, bias = self.linear_qkv(x)
        q, k, v = self.attention.exchange(*self._heads(fused, bias, run))
        past = run.cached.past_key_values(number) if run.cached is not None else ()
        if run.cached is not None:
            run.cached.record(number, k, v)
        attended = self.attention(q, (k, v), past, run.plan)
        out: WithBias = self.linear_proj(parts_first(attended, run.parts).flatten(2))
        return out

    def _heads(self, fused: Tensor, bias: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the projection, ``[t, n, b, heads, d]`` each."""
        config, total = self.config, None
        if self.tp_group.size() > 1:
            total = summed(squares_of_heads(fused, bias, config.kv_channels), self.tp_group)
        sizes = (config.kv_channels, config.hidden_size, config.layernorm_epsilon)
        return heads(
            fused,
            bias,
            total,
            self.q_norm(None),
            self.k_norm(None),
            *run.table,
            sizes,
            run.parts,
            run.num_frames,
        )


class CrossAttention(MegatronModule):  # type: ignore[misc]
    """Attention to all tokens of the text; padding, whose features are zero, is not masked."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        h, tp = config.hidden_size, groups.tp
        self.tp_group = tp
        self.linear_q = column(config, tp, h, h)
        self.linear_kv = column_of_whole(config, tp, h, h, projections=2)
        self.q_norm = FullWidthRMSNorm(config, tp)
        self.k_norm = FullWidthRMSNorm(config, tp)
        self.linear_proj = row(config, tp, h, h)

    def forward(self, x: Tensor, text: Tensor, number: int, run: Run) -> WithBias:
        """Return ``[s, b, h]`` and a bias to add for ``[s, b, h]`` and text ``[l, b, h]``."""
        projected, bias = self.linear_q(x)
        (query,) = heads_of(projected, 1, self.config.kv_channels)
        key, value = self._key_value(text, number, run.text)
        q, k, v = (y.permute(1, 2, 0, 3) for y in (self.q_norm(query, bias), key, value))
        attended = sdpa.attend(q, k, v).permute(2, 0, 1, 3)
        out: WithBias = self.linear_proj(attended.flatten(2))
        return out

    def _key_value(self, text: Tensor, number: int, known: dict[int, KeyValue] | None) -> KeyValue:
        """Return keys and values of the text, ``[l, b, n, d]`` each."""
        if known is not None and number in known:
            return known[number]
        projected, bias = self.linear_kv(text)
        key, value = heads_of(projected + bias, 2, self.config.kv_channels)
        pair = self.k_norm(key), value
        if known is not None:
            known[number] = pair
        return pair


class Block(MegatronModule):  # type: ignore[misc]
    """One block; its modulation differs from frame to frame.

    Args:
        number: number of the block in the whole model.
    """

    def __init__(
        self,
        config: TransformerConfig,
        options: VideoDiTOptions,
        groups: ProcessGroupCollection,
        number: int,
    ) -> None:
        super().__init__(config=config)
        h, ffn, tp = config.hidden_size, config.ffn_hidden_size, groups.tp
        self.number, self.tp_group = number, tp
        self.modulation = ModulationTable(config, 6)
        self.self_attention = SelfAttention(config, options, groups)
        self.cross_norm = LayerNorm(h, config.layernorm_epsilon, zero_centered=False)
        mark_replicated(self.cross_norm, config)
        self.cross_attention = CrossAttention(config, groups)
        self.linear_fc1 = column(config, tp, h, ffn)
        self.linear_fc2 = row(config, tp, ffn, h)

    def forward(self, hidden: Tensor, given: Conditioning, run: Run) -> Tensor:
        """Run the block on what this rank holds of the frames' tokens, ``[s, b, h]``."""
        parts = self.modulation(torch.unflatten(given.modulation, -1, (6, -1)))
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = parts
        hidden, normed = residual_and_modulated(hidden, shift, scale)
        attended = self.self_attention(normed, self.number, run)
        norm = self.cross_norm
        hidden, normed = gated_and_normed(hidden, *attended, gate, *weights_of(norm), spec_of(norm))
        told = self.cross_attention(normed, given.text, self.number, run)
        hidden, normed = added_and_modulated(hidden, *told, ffn_shift, ffn_scale)
        return gated(hidden, *self._ffn(normed), ffn_gate)

    def _ffn(self, x: Tensor) -> WithBias:
        out: WithBias = self.linear_fc2(activated(*self.linear_fc1(x), None, "gelu_tanh", False))
        return out


def recomputed(block: Block, hidden: Tensor, given: Conditioning, run: Run) -> Tensor:
    """Run a block that keeps its inputs only; they need not require a gradient."""
    output: Tensor = torch.utils.checkpoint.checkpoint(
        block, hidden, given, run, use_reentrant=False, preserve_rng_state=False
    )
    return output
