"""Flags of the layers of a GPT and of their sequence mixers; `text.hybrid` reads the pattern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import (
    FACTOR,
    SHARE,
    SIZE,
    WEIGHT,
    Range,
    derived,
    fixed_flag,
    flag,
    resumed_flag,
    said_flag,
)
from megatron_ext.config.layers import ATTENTION, DENSE, EXPERTS
from megatron_ext.config.run import LayerSection, RunConfig
from megatron_ext.text.config.moe import MoEConfig


@dataclass(frozen=True)
class HybridConfig(LayerSection):
    """The flags that choose the kind of each layer, with Megatron-LM's names.

    Attributes:
        layer_kinds: the kind of each decoder layer (see `config.layers`); None if all layers have
            attention, and an MLP or experts by ``--moe-layer-freq``.
        depth_kind: the kind of the layer of each depth of multi-token prediction; None for that of
            the last decoder layer.
    """

    SECTION: ClassVar[str] = "hybrid"

    hybrid_layer_pattern: str | None = flag(
        None,
        "the layers as letters, such as *-*-|*-*-: attention (*), Mamba-2 (M), gated DeltaNet (G), "
        "Kimi Delta Attention (K) or DeepSeek's sparse attention (D), and an MLP (-) or experts "
        "(E); | ends a pipeline stage, / begins a depth of multi-token prediction",
        names="--hybrid-override-pattern",
        if_changed="allow",
    )
    hybrid_attention_ratio: float = flag(
        0.0,
        "share of attention among --num-layers single layers, the others being Mamba-2",
        SHARE,
        if_changed="allow",
    )
    hybrid_mlp_ratio: float = flag(
        0.0,
        "share of MLPs among --num-layers single layers, the others being Mamba-2",
        SHARE,
        if_changed="allow",
    )
    experimental_attention_variant: str | None = flag(
        None,
        "what takes the place of attention, in all layers but those of --linear-attention-freq",
        choices="gated_delta_net dsa",
        if_changed="allow",
    )
    linear_attention_freq: str | None = flag(
        None,
        "every n-th layer has attention, not --experimental-attention-variant gated_delta_net; or "
        "a list such as [1,1,0] with a 0 for attention",
        if_changed="allow",
    )
    layer_kinds: tuple[str, ...] | None = derived()
    depth_kind: str | None = derived()

    @property
    def is_given(self) -> bool:
        """Return whether a flag of this section chooses the layers."""
        return (
            self.hybrid_layer_pattern is not None
            or self.experimental_attention_variant is not None
            or self.hybrid_attention_ratio + self.hybrid_mlp_ratio > 0
        )

    def transformer_fields(self, config: RunConfig) -> Mapping[str, object]:
        """Return the fields of `StepTransformerConfig` for layers that no plain GPT has."""
        if self.layer_kinds is None:
            return {}
        return {"layer_kinds": self.layer_kinds, "depth_kind": self.depth_kind}

    def torch_only(self) -> list[str]:
        """Return the user's flags that only the torch layers support, not Transformer Engine's."""
        if self.layer_kinds is None:
            return []
        if self.experimental_attention_variant is not None:
            return ["--experimental-attention-variant"]
        pattern = self.hybrid_layer_pattern is not None
        return ["--hybrid-layer-pattern" if pattern else "--hybrid-attention-ratio"]


@dataclass(frozen=True)
class MixerConfig(LayerSection):
    """The sizes of sequence mixers other than attention, with Megatron-LM's names and defaults."""

    SECTION: ClassVar[str] = "mixer"

    linear_conv_kernel_dim: int = fixed_flag(
        4, "positions of the short convolution of gated DeltaNet and Kimi Delta Attention", SIZE
    )
    linear_key_head_dim: int = fixed_flag(128, "channels of a head's key in these layers", SIZE)
    linear_value_head_dim: int = fixed_flag(128, "channels of a head's value in these layers", SIZE)
    linear_num_key_heads: int = fixed_flag(16, "heads of queries and keys in these layers", SIZE)
    linear_num_value_heads: int = fixed_flag(32, "heads of values in these layers", SIZE)
    mamba_state_dim: int = fixed_flag(128, "channels of the state of a Mamba-2 layer", SIZE)
    mamba_head_dim: int = fixed_flag(64, "channels of a head of a Mamba-2 layer", SIZE)
    mamba_num_groups: int = fixed_flag(8, "groups of heads that share B and C", SIZE)
    mamba_num_heads: int | None = fixed_flag(
        None, "heads of a Mamba-2 layer; default: 2 × --hidden-size / --mamba-head-dim", SIZE
    )
    mamba_conv_kernel_dim: int = fixed_flag(
        4, "positions of the short convolution of a Mamba-2 layer", SIZE
    )
    mamba_conv_bias: bool = fixed_flag(True, "learn a bias of this convolution")
    mamba_time_step_min: float = fixed_flag(
        0.0, "shortest step of a token in a Mamba-2 layer, after softplus", WEIGHT
    )
    mamba_time_step_max: float | None = fixed_flag(
        None, "longest step of a token in a Mamba-2 layer; default: no limit", FACTOR
    )
    dsa_indexer_n_heads: int | None = fixed_flag(
        None, "heads of the indexer of DeepSeek's sparse attention", SIZE
    )
    dsa_indexer_head_dim: int | None = fixed_flag(None, "channels of a head of the indexer", SIZE)
    dsa_indexer_topk: int | None = said_flag(
        None, "keys that each query attends to in sparse attention", SIZE
    )
    dsa_indexer_rope_interleaved: bool = fixed_flag(
        False, "rotate neighbouring channels of the indexer together (GLM-5)"
    )
    dsa_indexer_k_norm_epsilon: float | None = resumed_flag(
        None,
        "epsilon of the norm of the indexer's keys; default: --norm-epsilon; 1e-6 in DeepSeek's "
        "models",
        Range(0, 1, above=True),
    )
    dsa_indexer_loss_coeff: float | None = said_flag(
        None, "weight of the loss that trains the indexer on attention's scores", WEIGHT
    )
    dsa_indexer_use_sparse_loss: bool = said_flag(
        False, "compute the indexer's loss over the chosen keys only"
    )

    def transformer_fields(self, config: RunConfig) -> Mapping[str, object]:
        """Return the fields of megatron-core's TransformerConfig for the mixers of the model."""
        kinds = config.section(HybridConfig).layer_kinds
        if kinds is None:
            return {}
        fields = {
            name: value for name, value in vars(self).items() if name in (*SIZES, *INDEXER_LOSS)
        }
        if self.mamba_num_heads is None:
            fields["mamba_num_heads"] = self.num_mamba_heads(config)
        return fields

    def num_mamba_heads(self, config: RunConfig) -> int:
        """Return the number of heads of a Mamba-2 layer."""
        wide = 2 * (config.model.hidden_size or 0)
        return self.mamba_num_heads or wide // self.mamba_head_dim


def layer_kinds(config: RunConfig) -> tuple[str, ...]:
    """Return the kind of each layer of the decoder in a resolved configuration.

    Kinds are spelled as `config.layers` says.
    """
    hybrid = config.section(HybridConfig)
    return kinds_of(hybrid, config.section(MoEConfig), config.model.num_layers or 0)


def kinds_of(hybrid: HybridConfig, moe: MoEConfig, num_layers: int) -> tuple[str, ...]:
    """Return the kind of each of ``num_layers`` layers, see `layer_kinds`."""
    if hybrid.layer_kinds is not None:
        return hybrid.layer_kinds
    return tuple(ATTENTION + (EXPERTS if has else DENSE) for has in moe.expert_layers(num_layers))


def depth_kind(config: RunConfig) -> str:
    """Return the kind of the layer of a depth of multi-token prediction; see `layer_kinds`."""
    return config.section(HybridConfig).depth_kind or layer_kinds(config)[-1]


LINEAR_SIZES = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
MAMBA_SIZES = (
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "mamba_conv_kernel_dim",
    "mamba_conv_bias",
    "mamba_time_step_min",
    "mamba_time_step_max",
)
INDEXER_SIZES = "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"
INDEXER_FORM = "dsa_indexer_rope_interleaved", "dsa_indexer_k_norm_epsilon"
INDEXER_LOSS = "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"
SIZES_BY_LETTER = {
    "M": MAMBA_SIZES,
    "G": LINEAR_SIZES,
    "K": LINEAR_SIZES,
    "D": (*INDEXER_SIZES, *INDEXER_FORM),
}
"""The fields of `MixerConfig` that decide what each mixer computes, by its letter."""
SIZES = (*LINEAR_SIZES, *MAMBA_SIZES, *INDEXER_SIZES, *INDEXER_FORM)
