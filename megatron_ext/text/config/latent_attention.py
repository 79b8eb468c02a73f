"""Flags of multi-latent attention, their rules, and which other flags it replaces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import (
    COUNT,
    FACTOR,
    SIZE,
    WEIGHT,
    Range,
    default_of,
    fixed_flag,
    resumed_flag,
    spelling_of,
)
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.rules.build import RECOMPUTED, RECOMPUTED_LATENT
from megatron_ext.config.run import LayerSection, RunConfig, Side
from megatron_ext.text.config.positions import PositionConfig

REPLACED = {
    "group_query_attention": "its heads have keys of their own, from one vector per token",
    "add_qkv_bias": "its projections have no biases",
    "rotary_interleaved": "its channels are always rotated in neighbouring pairs",
    "rotary_seq_len_interpolation_factor": "its frequencies are scaled by `--rope-type yarn`",
    "use_rope_scaling": "its frequencies are scaled by `--rope-type yarn`",
    "rope_scaling": "its frequencies are scaled by `--rope-type yarn`",
    "rope_local_base_freq": "all its layers have one base",
    "no_rope_freq": "all its layers rotate a part of each head",
    "softmax_scale": "its factor follows from the channels of a key and `--mscale-all-dim`",
}
"""Fields of flags that multi-latent attention does not use, each with the reason."""


@dataclass(frozen=True)
class LatentAttentionConfig(LayerSection):
    """Multi-latent attention (DeepSeek-V2, arXiv:2405.04434); names are Megatron-LM's."""

    SECTION: ClassVar[str] = "latent_attention"

    multi_latent_attention: bool = fixed_flag(
        False, "compute keys and values of all heads from one small vector per token (DeepSeek)"
    )
    q_lora_rank: int | None = fixed_flag(
        None, "width of the vector that queries are computed from; default: the hidden state", SIZE
    )
    kv_lora_rank: int = fixed_flag(
        32, "width of the vector that keys and values are computed from", SIZE
    )
    qk_head_dim: int = fixed_flag(128, "channels of a head's query and key without rotation", SIZE)
    qk_pos_emb_head_dim: int = fixed_flag(64, "channels of a head's query and key to rotate", SIZE)
    v_head_dim: int = fixed_flag(128, "channels of a head's value", SIZE)
    rope_type: str = resumed_flag(
        "yarn", "rotary embedding of --multi-latent-attention", choices="rope yarn"
    )
    rotary_scaling_factor: float = resumed_flag(
        1.0, "length to train for over --original-max-position-embeddings", Range(1, 1e6)
    )
    original_max_position_embeddings: int = resumed_flag(
        4096, "longest sequence that the model was trained for before", COUNT, "tokens"
    )
    beta_fast: float = resumed_flag(32, "turns beyond which a frequency stays as it is", FACTOR)
    beta_slow: float = resumed_flag(1, "turns below which a frequency is divided in full", FACTOR)
    mscale: float = resumed_flag(1.0, "weight of the rotary embedding's growth by scaling", WEIGHT)
    mscale_all_dim: float = resumed_flag(
        0.0, "weight of the growth of attention's scores by scaling", WEIGHT
    )

    def transformer_fields(self, config: RunConfig) -> Mapping[str, object]:
        """Return the fields of megatron-core's MLATransformerConfig; none for other attention."""
        if not self.multi_latent_attention:
            return {}
        positions = config.section(PositionConfig)
        return {
            **dataclasses.asdict(self),
            "rotary_base": positions.rotary_base,
            "rotary_percent": positions.rotary_percent,
            "softmax_scale": softmax_scale(self),
        }

    def resolved_model(self, model: ModelConfig) -> ModelConfig:
        """Return the section ``model`` of a network whose heads are those of latent attention."""
        if not self.multi_latent_attention:
            return model
        return dataclasses.replace(
            model, kv_channels=self.v_head_dim, num_query_groups=None, add_qkv_bias=False
        )

    def attention_sides(self, config: RunConfig) -> Sequence[Side] | None:
        """Return the widths of the projections; None for other attention."""
        if not self.multi_latent_attention:
            return None
        tp = config.parallel.tensor_model_parallel_size
        heads = config.model.num_attention_heads or 0
        keys = "--num-attention-heads times the sum of --qk-head-dim and"
        rotated = self.qk_pos_emb_head_dim
        rank = self.kv_lora_rank
        return [
            ("--q-lora-rank", self.q_lora_rank, 1),
            ("--kv-lora-rank", rank, 1),
            ("--kv-lora-rank plus --qk-pos-emb-head-dim", rank + rotated, 1),
            (f"{keys} --qk-pos-emb-head-dim", heads * (self.qk_head_dim + rotated), tp),
            (f"{keys} --v-head-dim", heads * (self.qk_head_dim + self.v_head_dim), tp),
            ("--num-attention-heads times --v-head-dim", heads * self.v_head_dim, tp),
        ]

    def unused_fields(self) -> frozenset[str]:
        """Return all other fields where there is no latent attention."""
        names = frozenset(field.name for field in dataclasses.fields(self))
        return frozenset() if self.multi_latent_attention else names - {"multi_latent_attention"}

    def errors(self, config: RunConfig) -> Iterator[str]:
        """Yield a sentence for a part of latent attention to recompute where there is none."""
        model = config.model
        modules = model.recompute_modules or ()
        selective = model.recompute_granularity == "selective"
        if selective and RECOMPUTED_LATENT in modules and not self.multi_latent_attention:
            yield (
                f"`--recompute-modules` ({RECOMPUTED_LATENT}) needs `--multi-latent-attention`; "
                f"use {', '.join(RECOMPUTED)}."
            )


def latent_attention_errors(given: RunConfig) -> Iterator[str]:
    """Yield a sentence for each fault in the flags of ``--multi-latent-attention``.

    ``given`` are the flags before anything was derived from them.
    """
    name = "`--multi-latent-attention`"
    model = given.model
    latent = given.section(LatentAttentionConfig)
    positions = given.section(PositionConfig)
    if not latent.multi_latent_attention:
        return
    for field, reason in REPLACED.items():
        section = positions if hasattr(positions, field) else model
        if getattr(section, field) != default_of(section, field):
            spelled = spelling_of(section, field)
            yield f"`{spelled}` does not go with {name}: {reason}; leave it out."
    if model.kv_channels not in (None, latent.v_head_dim):
        yield (
            f"`--kv-channels` ({model.kv_channels}) must be `--v-head-dim` ({latent.v_head_dim}) "
            f"with {name}, whose keys have `--qk-head-dim` plus `--qk-pos-emb-head-dim` channels; "
            "leave it out."
        )
    kind = positions.position_embedding_type
    if kind != "rope":
        yield (
            f"{name} rotates a part of each head, which does not go with "
            f"`--position-embedding-type {kind}`; use rope."
        )
    rotated = latent.qk_pos_emb_head_dim
    share = positions.rotary_percent
    if rotated % 2:
        yield (
            f"`--qk-pos-emb-head-dim` ({rotated}) must be even, since channels are rotated in "
            f"pairs; use {rotated + 1}."
        )
    elif int(rotated * share) < 2:
        yield (
            f"`--rotary-percent` ({share}) leaves no pair of the {rotated} channels "
            f"of `--qk-pos-emb-head-dim` to rotate; use {2 / rotated:g} or more."
        )
    yield from _yarn_errors(latent, positions)


def _yarn_errors(latent: LatentAttentionConfig, positions: PositionConfig) -> Iterator[str]:
    """Yield a sentence for each fault in the flags of YaRN (Peng et al., arXiv:2309.00071)."""
    if latent.rope_type != "yarn":
        return
    share = positions.rotary_percent
    if share != 1:
        yield (
            f"`--rotary-percent` ({share}) must be 1 with `--rope-type yarn`, which "
            "rotates every channel of `--qk-pos-emb-head-dim`; use `--rope-type rope`."
        )
    if latent.beta_slow >= latent.beta_fast:
        yield (
            f"`--beta-slow` ({latent.beta_slow:g}) must be below `--beta-fast` "
            f"({latent.beta_fast:g}); use {latent.beta_fast / 32:g}."
        )
    if positions.rotary_base <= 1:
        yield f"`--rotary-base` ({positions.rotary_base}) must be above 1 with yarn; use 10000."


def softmax_scale(latent: LatentAttentionConfig) -> float:
    """Return the factor of attention's scores, ``m**2 / sqrt(d)``, d channels of a key.

    m is 1, or ``0.1 * mscale_all_dim * ln(factor) + 1`` if YaRN scales lengths by a factor above 1
    (arXiv:2309.00071, section 3.4, where it multiplies queries and keys).
    """
    growth = 0.1 * latent.mscale_all_dim * math.log(latent.rotary_scaling_factor) + 1.0
    return growth**2 / math.sqrt(latent.qk_head_dim + latent.qk_pos_emb_head_dim)
