"""The double-stream block: weights of their own for text and image, one joint attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.models.mmdit.attention import JointAttention, QKNorm
from megatron_ext.models.mmdit.linear import ColumnPiece, RowPiece, enter, leave
from megatron_ext.models.mmdit.modulation import Modulation, modulated
from megatron_ext.models.mmdit.options import MMDiTOptions
from megatron_ext.models.mmdit.sequence import LocalTokens, TokenRange
from megatron_ext.models.mmdit.sizes import MMDiTSizes

Table = tuple[Tensor, Tensor]
Layer = Callable[[Tensor], Tensor]


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
        self.modulation = Modulation(config, 6, zero=options.adaln_zero)
        self.linear_qkv = ColumnPiece(h, 3 * h, config, tp, bias=sizes.qkv_bias)
        self.norm = QKNorm(config)
        self.linear_proj = RowPiece(h, h, config, tp)
        self.linear_fc1 = ColumnPiece(h, m, config, tp)
        self.linear_fc2 = RowPiece(m, h, config, tp)

    def mlp(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[s, b, h]`` to this rank's part of the sum, and its bias."""
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


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
        txt, img = _split(hidden, tokens.part)
        parts = [self.txt.modulation.parts(vec), self.img.modulation.parts(vec)]
        streams = [
            modulated(x, shift, scale)
            for x, (shift, scale, *_) in zip((txt, img), parts, strict=True)
        ]
        joint = enter(torch.cat(streams), self.config, self.tp_group)
        attended = self._attend(joint, table, tokens.chunk)
        outputs = self._project(attended, tokens, lambda s: s.linear_proj)
        txt, img = (
            x + gate * y for x, y, (_, _, gate, *_) in zip((txt, img), outputs, parts, strict=True)
        )
        streams = [
            modulated(x, shift, scale)
            for x, (*_, shift, scale, _) in zip((txt, img), parts, strict=True)
        ]
        joint = enter(torch.cat(streams), self.config, self.tp_group)
        outputs = self._project(joint, tokens, lambda s: s.mlp)
        return torch.cat(
            [x + gate * y for x, y, (*_, gate) in zip((txt, img), outputs, parts, strict=True)]
        )

    def _attend(self, joint: Tensor, table: Table, chunk: TokenRange) -> Tensor:
        """Attention of the streams' heads; ``[s, b, h]`` to ``[s, b, h/tp]``."""
        txt, img = (
            stream.norm.split(stream.linear_qkv(x))
            for stream, x in zip((self.txt, self.img), _split(joint, chunk), strict=True)
        )
        query, key, value = (torch.cat(pair) for pair in zip(txt, img, strict=True))
        return self.attention((query, key, value), table)

    def _project(
        self,
        joint: Tensor,
        tokens: LocalTokens,
        layer: Callable[[Stream], Callable[[Tensor], tuple[Tensor, Tensor | None]]],
    ) -> list[Tensor]:
        """Each stream's layer, summed over the tensor-parallel ranks, with its bias."""
        sums, biases = zip(
            *(
                layer(stream)(x)
                for stream, x in zip((self.txt, self.img), _split(joint, tokens.chunk), strict=True)
            ),
            strict=True,
        )
        total = leave(torch.cat(sums), self.config, self.tp_group)
        return [x + b for x, b in zip(_split(total, tokens.part), biases, strict=True)]


def _split(joint: Tensor, held: TokenRange) -> tuple[Tensor, Tensor]:
    """Text and image of ``[s, b, h]``; either may be empty."""
    return joint[: held.local_text], joint[held.local_text :]
