"""Flags of the MMDiT: a named size, what differs from it, and how it is computed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ext.config.flags import flag
from megatron_ext.config.mmdit_sizes import EPSILON, SIZES, MMDiTSizes
from megatron_ext.config.ranges import FACTOR, NATURAL, SIZE, WEIGHT, Range

if TYPE_CHECKING:
    from megatron_ext.config.model import ModelConfig

_OF_SIZES = (
    "axes_dim num_double_blocks num_single_blocks patch_size mlp_ratio "
    "guidance_embed channels cond_embed"
)


@dataclass(frozen=True)
class MMDiTConfig:
    """The model of pretrain_video.py.

    Attributes:
        channels, caption_width, pooled_caption_width: of the data, which decides them.
        cond_embed: the model is given references, since some condition mode has them.
    """

    mmdit_size: str = flag(
        "tiny", "named size; --hidden-size and the flags below change it", choices=tuple(SIZES)
    )
    num_double_blocks: int | None = flag(
        None, "blocks with weights of their own for the text", bounds=Range(0, 10**6)
    )
    num_single_blocks: int | None = flag(
        None, "blocks on the joint sequence", bounds=Range(0, 10**6)
    )
    axes_dim: tuple[int, int, int] | None = flag(
        None, "parts of a head that rotate with frame, row and column", nargs=3, bounds=SIZE
    )
    patch_size: int | None = flag(
        None, "a token is a square of so many latent cells a side", bounds=SIZE
    )
    mlp_ratio: int | None = flag(None, "width of the MLPs over the hidden size", bounds=SIZE)
    guidance_embed: bool = flag(False, "the model is told the strength of --guidance")
    guidance: float = flag(4.0, "what a model with --guidance-embed is told", bounds=WEIGHT)
    adaln_zero: bool = flag(
        True, "modulations and the last layer start at zero; off as in Open-Sora's code"
    )
    recompute_double_blocks: int | None = flag(
        None,
        "first double blocks that keep only their inputs for the backward pass; default: all",
        bounds=NATURAL,
    )
    recompute_single_blocks: int | None = flag(
        None, "of single blocks; default: all", bounds=NATURAL
    )
    double_block_cost: float = flag(
        1.0,
        "time of a double block over that of a single one, for the cut into stages",
        bounds=FACTOR,
    )
    channels: int | None = None
    caption_width: int | None = None
    pooled_caption_width: int | None = None
    cond_embed: bool = False

    def sizes(self, model: ModelConfig) -> MMDiTSizes:
        """The sizes with the changes of the flags and the widths of the data.

        Raises:
            ConfigError: sizes that do not fit together.
        """
        given = {name: getattr(self, name) for name in _OF_SIZES.split()}
        given |= {"text_width": self.caption_width, "pooled_width": self.pooled_caption_width}
        changes: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        if self.axes_dim is not None:
            changes["axes_dim"] = tuple(self.axes_dim)
        if model.hidden_size is not None:
            changes["hidden_size"] = model.hidden_size
        if model.num_attention_heads is not None:
            changes["num_heads"] = model.num_attention_heads
        return dataclasses.replace(SIZES[self.mmdit_size], **changes)

    def described(self, model: ModelConfig) -> ModelConfig:
        """The model's section as it follows from the sizes.

        The sequence has no length of its own: that of the longest clip is filled in once the data
        is known.

        Raises:
            ConfigError: see `sizes`.
        """
        sizes = self.sizes(model)
        return dataclasses.replace(
            model,
            num_layers=sizes.num_blocks,
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_heads,
            kv_channels=sizes.head_dim,
            ffn_hidden_size=sizes.mlp_size,
            qk_layernorm=True,
            norm_epsilon=EPSILON,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            untie_embeddings_and_output_weights=True,
            blocks_dealt_by_cost=True,
        )
