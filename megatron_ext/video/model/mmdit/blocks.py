"""The blocks of an MMDiT: double-stream, single-stream, and the last layer.

A double block has weights of their own for text and image, and one joint attention. A single block
runs attention and MLP side by side on the joint sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.pointwise import activated
from megatron_ext.video.config.mmdit import MMDiTSizes
from megatron_ext.video.model.attention import JointAttention, QKNorm
from megatron_ext.video.model.linear import ColumnPiece, RowPiece, enter, leave, mark_replicated
from megatron_ext.video.model.mmdit.options import MMDiTOptions
from megatron_ext.video.model.mmdit.pointwise import (
    add_and_modulate_streams,
    add_gated,
    add_streams,
    heads,
    joint_heads,
    residual_and_modulated,
    residual_and_modulated_streams,
)
from megatron_ext.video.model.modulation import Modulation, modulated_alone, start_at_zero
from megatron_ext.video.model.tokens import LocalTokens, TokenRange

Table = tuple[Tensor, Tensor]


class Stream(MegatronModule):  # type: ignore[misc]
    """The layers of one stream; `DoubleBlock` says in which order they run."""

    def __init__(
        self,
        config: TransformerConfig,
        sizes: MMDiTSizes,
        options: MMDiTOptions,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        h, m, tp = sizes.hidden_size, sizes.mlp_size, groups.tp
        self.tp_group = tp
        self.modulation = Modulation(config, 6, zero=options.adaln_zero)
        self.linear_qkv = ColumnPiece(h, 3 * h, config, tp, bias=sizes.qkv_bias)
        self.norm = QKNorm(config, tp)
        self.linear_proj = RowPiece(h, h, config, tp)
        self.linear_fc1 = ColumnPiece(h, m, config, tp)
        self.linear_fc2 = RowPiece(m, h, config, tp)

    def mlp(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return this rank's part of the sum for ``[s, b, h]``, and its bias."""
        narrow = activated(*self.linear_fc1(x), None, "gelu_tanh", False)
        out: tuple[Tensor, Any] = self.linear_fc2(narrow)
        return out


class DoubleBlock(MegatronModule):  # type: ignore[misc]
    """Attention and an MLP, each added through a gate to the stream that it came from."""

    def __init__(
        self,
        config: TransformerConfig,
        sizes: MMDiTSizes,
        options: MMDiTOptions,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = groups.tp
        self.txt = Stream(config, sizes, options, groups)
        self.img = Stream(config, sizes, options, groups)
        self.attention = JointAttention(config, groups.tp, groups.cp, options.cp_comm_type)

    def forward(self, hidden: Tensor, vec: Tensor, table: Table, tokens: LocalTokens) -> Tensor:
        """Run the block.

        Args:
            hidden: what this rank holds of [text; image], ``[s, b, h]``; s/tp with sequence
                parallelism.
            vec: ``[b, h]``.
            table: rotary table of the context-parallel rank's slice.
            tokens: which tokens these are.

        Returns:
            A tensor in the shape of ``hidden``.
        """
        txt, img = (stream.modulation.parts(vec) for stream in (self.txt, self.img))
        hidden, *normed = residual_and_modulated_streams(
            hidden, tokens.part.local_text, *txt[:2], *img[:2]
        )
        attended = _split(self._attend(self._enter(normed, tokens), table), tokens.cp_slice)
        outputs = self._leave([s.linear_proj(x) for s, x in self._pairs(attended)], tokens)
        hidden, *normed = add_and_modulate_streams(
            hidden, *outputs, txt[2], img[2], *txt[3:5], *img[3:5]
        )
        entered = self._enter(normed, tokens)
        outputs = self._leave([s.mlp(x) for s, x in self._pairs(entered)], tokens)
        return add_streams(hidden, *outputs, txt[5], img[5])

    def _pairs(self, streams: Sequence[Tensor]) -> Iterable[tuple[Stream, Tensor]]:
        """Return each stream's layers with its tokens."""
        return zip((self.txt, self.img), streams, strict=True)

    def _enter(self, streams: Sequence[Tensor], tokens: LocalTokens) -> Sequence[Tensor]:
        """Give both streams to every tensor-parallel rank, by one collective."""
        if self.tp_group.size() == 1:
            return streams
        joint = enter(torch.cat(tuple(streams)), self.config, self.tp_group)
        return _split(joint, tokens.cp_slice)

    def _attend(self, streams: Sequence[Tensor], table: Table) -> Tensor:
        """Return the attention of the streams' heads: twice ``[s, b, h]`` to ``[s, b, h/tp]``."""
        txt, img = (stream.linear_qkv(x) for stream, x in self._pairs(streams))
        weights = (*self.img.norm.weights, *self.txt.norm.weights)
        return self.attention(joint_heads(*img, *txt, *weights, *table, self.img.norm.spec))

    def _leave(
        self, partial_sums: Sequence[tuple[Tensor, Any]], tokens: LocalTokens
    ) -> tuple[Tensor, ...]:
        """Return the streams' outputs, summed over the tensor-parallel ranks, then their biases."""
        (txt, txt_bias), (img, img_bias) = partial_sums
        if self.tp_group.size() > 1:
            total = leave(torch.cat((txt, img)), self.config, self.tp_group)
            txt, img = _split(total, tokens.part)
        return txt, img, txt_bias, img_bias


def _split(joint: Tensor, held: TokenRange) -> Sequence[Tensor]:
    """Return text and image of ``[s, b, h]``; either may be empty."""
    return torch.split(joint, [held.local_text, joint.size(0) - held.local_text])


class SingleBlock(MegatronModule):  # type: ignore[misc]
    """``x + gate * W2 [attention; gelu(mlp)]``, where one modulated norm and W1 give both.

    FLUX's W1 ``[3h + m, h]`` and W2 ``[h, h + m]`` are two pieces each, since a rank's part is not
    one contiguous part: by heads for the attention, by width for the MLP. W1 is ``linear_qkv`` and
    ``linear_fc1``, W2 is ``linear_proj`` (with the bias) and ``linear_fc2``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        sizes: MMDiTSizes,
        options: MMDiTOptions,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        h, m, tp = sizes.hidden_size, sizes.mlp_size, groups.tp
        self.tp_group = tp
        self.modulation = Modulation(config, 3, zero=options.adaln_zero)
        self.linear_qkv = ColumnPiece(h, 3 * h, config, tp, bias=sizes.qkv_bias)
        self.linear_fc1 = ColumnPiece(h, m, config, tp)
        self.norm = QKNorm(config, tp)
        self.linear_proj = RowPiece(h, h, config, tp, fan_in=h + m)
        self.linear_fc2 = RowPiece(m, h, config, tp, bias=False, fan_in=h + m)
        self.attention = JointAttention(config, tp, groups.cp, options.cp_comm_type)

    def forward(
        self, hidden: Tensor, vec: Tensor, table: tuple[Tensor, Tensor], tokens: LocalTokens
    ) -> Tensor:
        """Run the block on all tokens alike; `DoubleBlock.forward` explains the arguments."""
        shift, scale, gate = self.modulation.parts(vec)
        hidden, normed = residual_and_modulated(hidden, shift, scale)
        joint = enter(normed, self.config, self.tp_group)
        attended = self.attention(
            heads(*self.linear_qkv(joint), *self.norm.weights, *table, self.norm.spec)
        )
        attention, bias = self.linear_proj(attended)
        mlp, _ = self.linear_fc2(activated(*self.linear_fc1(joint), None, "gelu_tanh", False))
        if self.tp_group.size() == 1:
            return add_gated(hidden, attention, mlp, bias, gate)
        total = leave(attention + mlp, self.config, self.tp_group)
        return add_gated(hidden, total, None, bias, gate)


class FinalLayer(MegatronModule):  # type: ignore[misc]
    """A modulated norm and a linear layer, from ``[s, b, h]`` to ``[s, b, C * p * p]``."""

    def __init__(
        self,
        config: TransformerConfig,
        sizes: MMDiTSizes,
        options: MMDiTOptions,
        tp_group: ProcessGroup,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.modulation = Modulation(config, 2, zero=options.adaln_zero)
        self.linear = torch.nn.Linear(sizes.hidden_size, sizes.token_width)
        if options.adaln_zero:
            start_at_zero(self.linear)
        mark_replicated(self, config)

    def forward(self, hidden: Tensor, vec: Tensor) -> Tensor:
        """Return ``[s, b, C * p * p]`` for ``[s, b, h]`` and vec ``[b, h]``."""
        shift, scale = self.modulation.parts(vec)
        return self.linear(modulated_alone(hidden, shift, scale))  # type: ignore[no-any-return]
