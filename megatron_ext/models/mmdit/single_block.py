"""The single-stream block: attention and MLP side by side on the joint sequence."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.config.mmdit_sizes import MMDiTSizes
from megatron_ext.models.mmdit.attention import JointAttention, QKNorm
from megatron_ext.models.mmdit.linear import ColumnPiece, RowPiece, enter, leave
from megatron_ext.models.mmdit.modulation import Modulation
from megatron_ext.models.mmdit.options import MMDiTOptions
from megatron_ext.models.mmdit.pointwise import add_gated, heads, modulated_beside
from megatron_ext.models.mmdit.sequence import LocalTokens
from megatron_ext.models.pointwise import activated


class SingleBlock(MegatronModule):  # type: ignore[misc]
    """``x + gate * W2 [attention; gelu(mlp)]``, both from ``W1`` of one modulated norm.

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
        """Run the block; see `DoubleBlock.forward`. All tokens are treated alike."""
        shift, scale, gate = self.modulation.parts(vec)
        hidden, normed = modulated_beside(hidden, shift, scale)
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
