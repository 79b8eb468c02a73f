"""Flags of a GPT's attention (windows, softmax, multi-latent attention), and their rules."""

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
    fixed_flag,
    flag,
    resumed_flag,
    said_flag,
)
from megatron_ext.config.layers import pattern_errors, windowed_layers
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.rules.model import RECOMPUTED, RECOMPUTED_LATENT
from megatron_ext.config.run import LayerSection, RunConfig, Side
from megatron_ext.errors import FlagError
from megatron_ext.text.config.positions import PositionConfig


@dataclass(frozen=True)
class AttentionConfig(LayerSection):
    """The flags of attention's windows, scores and softmax; names are Megatron-LM's."""

    SECTION: ClassVar[str] = "attention"

    window_size: tuple[int, int] | None = resumed_flag(
        None, "sliding window: tokens to the left and right, -1 unlimited", Range(-1), nargs=2
    )
    window_attn_skip_freq: str | None = resumed_flag(
        None, "full attention in every n-th layer, or where a list such as [1,0] has a 0"
    )
    softmax_scale: float | None = resumed_flag(
        None, "factor of the scores of attention; default: 1 over the square root of d", FACTOR
    )
    attn_logit_softcapping: float | None = resumed_flag(
        None, "limit c of the scores x of attention, which become c tanh(x / c)", FACTOR
    )
    softmax_type: str = fixed_flag(
        "vanilla",
        "learnable gives each head a logit that takes a share of the attention (a sink, as in "
        "gpt-oss); off-by-one fixes it at 0",
        choices="vanilla off-by-one learnable",
    )
    attention_output_gate: bool = fixed_flag(
        False,
        "multiply the output of each head by the sigmoid of a gate, which is projected with the "
        "query, as in Qwen3-Next",
    )
    qk_clip: bool = said_flag(
        False,
        "after each update, scale the weights of queries and keys of the heads whose largest logit "
        "in the step was above --qk-clip-threshold (MuonClip)",
    )
    qk_clip_alpha: float = said_flag(
        0.5,
        "power of the scale that --qk-clip gives to queries; keys get the rest",
        Range(0, 1, above=True, below=True),
    )
    qk_clip_threshold: float = said_flag(
        100.0, "logit of attention above which --qk-clip scales a head", FACTOR
    )
    log_max_attention_logit: bool = flag(
        False,
        "largest logit of attention of each layer to the trackers and metrics.jsonl, of the model "
        "to the log, too; --qk-clip does so anyway",
    )

    @property
    def changes_scores(self) -> bool:
        """Return whether attention has sinks or a soft cap, which plain kernels do not support."""
        return self.softmax_type != "vanilla" or self.attn_logit_softcapping is not None

    def windowed_layers(self, model: ModelConfig) -> list[bool]:
        """Return, for each decoder layer, whether a window limits its attention."""
        num_layers = model.num_layers or 0
        if self.window_size is None:
            return [False] * num_layers
        return windowed_layers(self.window_attn_skip_freq, num_layers)

    def transformer_fields(self, config: RunConfig) -> Mapping[str, object]:
        """Map the fields of `StepTransformerConfig` for windows and scores to their values."""
        pattern = None
        if self.window_attn_skip_freq is not None and self.window_size is not None:
            layers = [int(has) for has in self.windowed_layers(config.model)]
            # A depth of multi-token prediction is like the last layer.
            pattern = layers + layers[-1:] * (config.model.mtp_num_layers or 0)
        return {**dataclasses.asdict(self), "window_attn_skip_freq": pattern}

    def torch_only(self) -> list[str]:
        """Return the user's flags that only the torch layers support, not Transformer Engine's."""
        own = {
            "--attn-logit-softcapping": self.attn_logit_softcapping is not None,
            "--qk-clip": self.qk_clip,
            "--log-max-attention-logit": self.log_max_attention_logit,
        }
        return [name for name, given in own.items() if given]

    def te_versions(self, config: RunConfig) -> Mapping[str, str]:
        """Map ``--softmax-type`` to the oldest Transformer Engine release that supports its value.

        Return {} for the plain softmax, which all releases support.
        """
        return {} if self.softmax_type == "vanilla" else {"--softmax-type": "2.8.0"}

    def errors(self, config: RunConfig) -> Iterator[FlagError]:
        """Yield an error for each window or change of scores that the layers do not support."""
        model = config.model
        parallel = config.parallel
        if model.num_layers:
            skipped = self.window_attn_skip_freq
            yield from pattern_errors("--window-attn-skip-freq", skipped, model.num_layers)
        backend = model.attention_backend
        in_te = model.transformer_impl == TE_IMPL
        own = {
            "--softmax-type": self.softmax_type if self.softmax_type != "vanilla" else None,
            "--attn-logit-softcapping": self.attn_logit_softcapping,
        }
        for name, value in own.items():
            if value and not in_te and backend not in ("auto", "local"):
                yield FlagError(
                    "--attention-backend",
                    backend,
                    f"has no kernel for `{name}` ({value})",
                    "use auto or local",
                )
        rings = sorted(set(parallel.cp_comm_type) & {"p2p", "a2a+p2p"})
        if in_te and parallel.context_parallel_size > 1 and self.window_size is not None and rings:
            yield FlagError(
                "--window-size",
                None,
                f"over context-parallel ranks does not go with `--cp-comm-type` ({rings[0]})",
                "use all_gather or a2a",
            )


@dataclass(frozen=True)
class LatentAttentionConfig(LayerSection):
    """The flags of multi-latent attention (arXiv:2405.04434), with Megatron-LM's names."""

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

    latent_norm_epsilon: float | None = resumed_flag(
        None,
        "epsilon of the norms of those vectors; default: --norm-epsilon; 1e-6 in DeepSeek's models",
        Range(0, 1, above=True),
    )

    def transformer_fields(self, config: RunConfig) -> Mapping[str, object]:
        """Map the fields of megatron-core's MLATransformerConfig to the values for this run.

        Return {} if attention is not multi-latent.
        """
        if not self.multi_latent_attention:
            return {}
        positions = config.section(PositionConfig)
        rotates = positions.position_embedding_type == "rope"
        return {
            **dataclasses.asdict(self),
            "rotary_base": positions.rotary_base,
            "rotary_percent": positions.rotary_percent,
            "rotates_latent_heads": rotates,
            "softmax_scale": softmax_scale(self, rotates=rotates),
        }

    def torch_only(self) -> list[str]:
        """Return the user's flags that only the torch layers support, not Transformer Engine's."""
        return [] if self.latent_norm_epsilon is None else ["--latent-norm-epsilon"]

    def resolved_model(self, model: ModelConfig) -> ModelConfig:
        """Return ``model`` with the head size ``v_head_dim``, and no query groups or QKV biases.

        Return it unchanged if attention is not multi-latent.
        """
        if not self.multi_latent_attention:
            return model
        return dataclasses.replace(
            model, kv_channels=self.v_head_dim, num_query_groups=None, add_qkv_bias=False
        )

    def attention_sides(self, config: RunConfig) -> Sequence[Side] | None:
        """Return the widths of attention's projections, to check whether fp8 supports them.

        Each entry is (flags that give the width, width, number of ranks that shard it). Return None
        if attention is not multi-latent, and the usual widths apply.
        """
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
        """Return the names of this section's fields that have no effect.

        Without multi-latent attention, these are all fields except ``multi_latent_attention``;
        with it, none.
        """
        names = frozenset(field.name for field in dataclasses.fields(self))
        return frozenset() if self.multi_latent_attention else names - {"multi_latent_attention"}

    def errors(self, config: RunConfig) -> Iterator[FlagError]:
        """Yield an error if ``--recompute-modules`` has mla_up_proj without latent attention."""
        model = config.model
        modules = model.recompute_modules or ()
        selective = model.recompute_granularity == "selective"
        if selective and RECOMPUTED_LATENT in modules and not self.multi_latent_attention:
            yield FlagError(
                "--recompute-modules",
                RECOMPUTED_LATENT,
                "needs `--multi-latent-attention`",
                f"use {', '.join(RECOMPUTED)}",
            )


def softmax_scale(latent: LatentAttentionConfig, *, rotates: bool) -> float:
    """Return the factor of attention's scores, ``m**2 / sqrt(d)`` for keys of d channels.

    m is ``0.1 * mscale_all_dim * ln(rotary_scaling_factor) + 1``, as in YaRN (arXiv:2309.00071,
    section 3.4, where m multiplies queries and keys), and 1 if nothing ``rotates``.
    """
    growth = 1.0
    if rotates:
        growth += 0.1 * latent.mscale_all_dim * math.log(latent.rotary_scaling_factor)
    return growth**2 / math.sqrt(latent.qk_head_dim + latent.qk_pos_emb_head_dim)
