"""The double-stream block: weights of their own for text and image, one joint attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.config.mmdit_sizes import MMDiTSizes
from megatron_ext.models.mmdit.attention import JointAttention, QKNorm
from megatron_ext.models.mmdit.linear import ColumnPiece, RowPiece, enter, leave
from megatron_ext.models.mmdit.modulation import Modulation, modulated
from megatron_ext.models.mmdit.options import MMDiTOptions
from megatron_ext.models.mmdit.sequence import LocalTokens, TokenRange

Table = tuple[Tensor, Tensor]
Pair = tuple[Tensor, Tensor]
"""Of text and image."""


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
        out: tuple[Tensor, Any] = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
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
        streams = _split(hidden, tokens.part)
        parts = [stream.modulation.parts(vec) for stream in (self.txt, self.img)]
        first, second = [p[:3] for p in parts], [p[3:] for p in parts]
        attended = self._attend(self._enter(streams, first), table, tokens.chunk)
        streams = _add(streams, first, self._layer(attended, tokens, lambda s: s.linear_proj))
        joint = self._enter(streams, second)
        return torch.cat(_add(streams, second, self._layer(joint, tokens, lambda s: s.mlp)))

    def _enter(self, streams: Pair, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Both streams modulated, as one sequence that all tensor-parallel ranks see."""
        normed = [
            modulated(x, shift, scale) for x, (shift, scale, _) in zip(streams, parts, strict=True)
        ]
        return enter(torch.cat(normed), self.config, self.tp_group)

    def _attend(self, joint: Tensor, table: Table, chunk: TokenRange) -> Tensor:
        """Attention of the streams' heads; ``[s, b, h]`` to ``[s, b, h/tp]``."""
        txt, img = (
            stream.norm.split(stream.linear_qkv(x))
            for stream, x in zip((self.txt, self.img), _split(joint, chunk), strict=True)
        )
        query, key, value = (torch.cat(pair) for pair in zip(txt, img, strict=True))
        return self.attention((query, key, value), table)

    def _layer(
        self,
        joint: Tensor,
        tokens: LocalTokens,
        layer: Callable[[Stream], Callable[[Tensor], tuple[Tensor, Any]]],
    ) -> Pair:
        """Each stream's layer, summed over the tensor-parallel ranks, with its bias."""
        txt, img = _split(joint, tokens.chunk)
        (txt_sum, txt_bias), (img_sum, img_bias) = layer(self.txt)(txt), layer(self.img)(img)
        total = leave(torch.cat((txt_sum, img_sum)), self.config, self.tp_group)
        txt, img = _split(total, tokens.part)
        return txt + txt_bias, img + img_bias


def _add(streams: Pair, parts: Sequence[Sequence[Tensor]], outputs: Pair) -> Pair:
    """Add outputs through their gates."""
    (txt, img), (txt_out, img_out) = streams, outputs
    (*_, txt_gate), (*_, img_gate) = parts
    return txt + txt_gate * txt_out, img + img_gate * img_out


def _split(joint: Tensor, held: TokenRange) -> Pair:
    """Text and image of ``[s, b, h]``; either may be empty."""
    return joint[: held.local_text], joint[held.local_text :]
