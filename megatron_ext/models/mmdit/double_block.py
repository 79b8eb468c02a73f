"""The double-stream block: weights of their own for text and image, one joint attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.config.mmdit_sizes import MMDiTSizes
from megatron_ext.models.mmdit.attention import JointAttention, QKNorm
from megatron_ext.models.mmdit.linear import ColumnPiece, RowPiece, enter, leave
from megatron_ext.models.mmdit.modulation import Modulation
from megatron_ext.models.mmdit.options import MMDiTOptions
from megatron_ext.models.mmdit.pointwise import (
    add_and_modulate_streams,
    add_streams,
    joint_heads,
    modulated_streams_beside,
)
from megatron_ext.models.mmdit.sequence import LocalTokens, TokenRange
from megatron_ext.models.pointwise import activated

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
        """``[s, b, h]`` to this rank's part of the sum, and its bias."""
        narrow = activated(*self.linear_fc1(x), None, "gelu_tanh", False)
        out: tuple[Tensor, Any] = self.linear_fc2(narrow)
        return out


class DoubleBlock(MegatronModule):  # type: ignore[misc]
    """Attention and an MLP, each added to the stream that it came from, through a gate."""

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
            table: rotary table of the context-parallel rank's chunk.
            tokens: which tokens these are.

        Returns:
            As ``hidden``.
        """
        txt, img = (stream.modulation.parts(vec) for stream in (self.txt, self.img))
        hidden, *normed = modulated_streams_beside(
            hidden, tokens.part.local_text, *txt[:2], *img[:2]
        )
        attended = _split(self._attend(self._enter(normed, tokens), table), tokens.chunk)
        outputs = self._leave([s.linear_proj(x) for s, x in self._pairs(attended)], tokens)
        hidden, *normed = add_and_modulate_streams(
            hidden, *outputs, txt[2], img[2], *txt[3:5], *img[3:5]
        )
        entered = self._enter(normed, tokens)
        outputs = self._leave([s.mlp(x) for s, x in self._pairs(entered)], tokens)
        return add_streams(hidden, *outputs, txt[5], img[5])

    def _pairs(self, streams: Sequence[Tensor]) -> Iterable[tuple[Stream, Tensor]]:
        """Each stream's layers and tokens."""
        return zip((self.txt, self.img), streams, strict=True)

    def _enter(self, streams: Sequence[Tensor], tokens: LocalTokens) -> Sequence[Tensor]:
        """Both streams, for all tensor-parallel ranks to see, by one collective."""
        if self.tp_group.size() == 1:
            return streams
        joint = enter(torch.cat(tuple(streams)), self.config, self.tp_group)
        return _split(joint, tokens.chunk)

    def _attend(self, streams: Sequence[Tensor], table: Table) -> Tensor:
        """Attention of the streams' heads; twice ``[s, b, h]`` to ``[s, b, h/tp]``."""
        txt, img = (stream.linear_qkv(x) for stream, x in self._pairs(streams))
        weights = (*self.img.norm.weights, *self.txt.norm.weights)
        return self.attention(joint_heads(*img, *txt, *weights, *table, self.img.norm.spec))

    def _leave(
        self, partial_sums: Sequence[tuple[Tensor, Any]], tokens: LocalTokens
    ) -> tuple[Tensor, ...]:
        """The streams' outputs, summed over the tensor-parallel ranks, then their biases."""
        (txt, txt_bias), (img, img_bias) = partial_sums
        if self.tp_group.size() > 1:
            total = leave(torch.cat((txt, img)), self.config, self.tp_group)
            txt, img = _split(total, tokens.part)
        return txt, img, txt_bias, img_bias


def _split(joint: Tensor, held: TokenRange) -> Sequence[Tensor]:
    """Text and image of ``[s, b, h]``; either may be empty."""
    return torch.split(joint, [held.local_text, joint.size(0) - held.local_text])
