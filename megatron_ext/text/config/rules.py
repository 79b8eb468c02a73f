"""Lists the sections of a text run's configuration, and completes and checks them together."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_ext.config.flags import changed_fields
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.optimizer import (
    EXPERT_TARGETS,
    LATENT_DOWN_TARGETS,
    LATENT_TARGETS,
    TARGETS,
)
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError, FlagError
from megatron_ext.text.config.attention import (
    AttentionConfig,
    LatentAttentionConfig,
)
from megatron_ext.text.config.block import BlockConfig
from megatron_ext.text.config.hybrid import SIZES, HybridConfig, MixerConfig
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.config.samples import TextSampleConfig
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.data.config import DataConfig, FimConfig, direct_errors
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from megatron_ext.text.tokenizers import TokenizerConfig

SECTIONS = (
    PositionConfig,
    AttentionConfig,
    LatentAttentionConfig,
    BlockConfig,
    MoEConfig,
    DataConfig,
    FimConfig,
    SftConfig,
    TokenizerConfig,
    HybridConfig,
    MixerConfig,
    TaskEvaluationConfig,
    TextSampleConfig,
)
"""The configuration sections that pretrain_gpt.py adds to those of every training program."""


def resolve_text(config: RunConfig) -> RunConfig:
    """Return a text run's configuration with derived values, such as the layers that get LoRA."""
    if config.section(HybridConfig).is_given:
        from megatron_ext.text.hybrid import resolve_hybrid

        config = resolve_hybrid(config)
    data = config.section(DataConfig)
    sft = config.section(SftConfig)
    packs = sft.sft and sft.sft_batching != "padded"
    model = dataclasses.replace(config.model, document_masks=data.reset_attention_mask or packs)
    lora = config.lora
    if lora.lora_rank is not None and lora.lora_target_modules is None:
        lora = dataclasses.replace(lora, lora_target_modules=list(_targets(config)))
    config = dataclasses.replace(config, model=model, lora=lora)
    return config.with_section(
        config.section(PositionConfig).resolved(),
        data.resolved(),
        sft.resolved(config.model.seq_length),
    )


def _targets(config: RunConfig) -> Sequence[str]:
    """Return the names of a GPT's linear layers that get LoRA adapters by default."""
    latent = config.section(LatentAttentionConfig).multi_latent_attention
    usual = LATENT_TARGETS if latent else TARGETS
    hybrid = config.section(HybridConfig)
    if hybrid.layer_kinds is None:
        return usual
    from megatron_ext.text.config.mixer_rules import present_targets

    return present_targets(usual, hybrid)


def _all_targets(config: RunConfig) -> list[str]:
    """Return the names of a GPT's linear layers that may have LoRA adapters."""
    targets = list(_targets(config))
    if "linear_kv_up_proj" in targets:
        targets += LATENT_DOWN_TARGETS
    if config.section(MoEConfig).num_experts is not None:
        targets += EXPERT_TARGETS
    return targets


def _quantization_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault of ``--lora-quantize-weights``, and each flag it excludes."""
    lora = run.lora
    kind = lora.lora_quantize_weights
    if lora.lora_rank is None or kind is None:
        return
    refused = partial(FlagError, "--lora-quantize-weights", kind)
    if importlib.util.find_spec("bitsandbytes") is None:
        yield refused(
            "needs bitsandbytes, which is not installed",
            "install it with `pip install bitsandbytes`, or leave the flag out",
        )
    if not run.checkpoint.starts_elsewhere:
        yield refused("takes its weights from `--load-hf`, which is not given", "give a folder")
    if run.fp8.fp8_format is not None:
        yield refused(
            f"does not go with `--fp8-format` ({run.fp8.fp8_format}): a weight has one format",
            "leave one of them out",
        )
    if lora.lora_modules_to_save:
        yield refused(
            f"does not go with `--lora-modules-to-save` ({' '.join(lora.lora_modules_to_save)}), "
            "since its checkpoints hold adapters alone",
            "leave one of them out",
        )
    if lora.is_principal:
        yield refused(
            f"does not go with `--lora-init {lora.lora_init}`, which starts from weights that are "
            "not rounded",
            "use `--lora-init kaiming`",
        )


def text_rules(given: RunConfig, run: RunConfig) -> list[FlagError]:
    data = run.section(DataConfig)
    sft = run.section(SftConfig)
    return [
        *_pattern_errors(given, run),
        *_expert_errors(run),
        *_block_errors(run),
        *data.own_errors(full_validation=run.training.full_validation),
        *direct_errors(data, run),
        *run.section(FimConfig).own_errors(),
        *_sft_errors(sft, run),
        *_target_errors(run),
        *_quantization_errors(run),
        *_mask_errors(data, sft, run.model.transformer_impl),
        *_latent_errors(given),
        *_rotary_errors(run),
        *_clip_errors(run),
    ]


def _sft_errors(sft: SftConfig, run: RunConfig) -> list[FlagError]:
    """Return an error for each value of a flag that a run with ``--sft`` cannot have."""
    if not sft.sft:
        return []
    from megatron_ext.text.config.sft_rules import sft_errors

    return sft_errors(sft, run)


def _latent_errors(given: RunConfig) -> list[FlagError]:
    """Return the errors in the flags of multi-latent attention, as the user gave them."""
    if not given.section(LatentAttentionConfig).multi_latent_attention:
        return []
    from megatron_ext.text.config.latent_rules import latent_attention_errors

    return list(latent_attention_errors(given))


def _target_errors(run: RunConfig) -> list[FlagError]:
    """Return an error if ``--lora-target-modules`` names what no layer of the model is."""
    if run.lora.lora_target_modules is None:
        return []
    from megatron_ext.config.rules.lora import target_errors

    return target_errors(run.lora, _all_targets(run))


def _pattern_errors(given: RunConfig, run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault of flags such as ``--hybrid-layer-pattern`` in ``given``.

    ``run`` is the same configuration with derived values.
    """
    if given.section(HybridConfig).is_given:
        from megatron_ext.text.hybrid import hybrid_errors

        yield from hybrid_errors(given, run)


def _expert_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each wrong flag of experts, if the model has them."""
    moe = run.section(MoEConfig)
    if moe.num_experts is not None:
        from megatron_ext.text.config.moe_rules import expert_errors

        yield from expert_errors(moe, run)


def _block_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each wrong flag of norms and factors in a layer, if one is given."""
    block = run.section(BlockConfig)
    if changed_fields(block):
        from megatron_ext.text.config.block_rules import block_errors

        yield from block_errors(block, run)


def _rotary_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each wrong flag of rotary positions, unless attention is multi-latent."""
    model = run.model
    section = run.section(PositionConfig)
    latent = run.section(LatentAttentionConfig).multi_latent_attention
    sizes = model.num_layers, model.hidden_size, model.num_attention_heads, model.seq_length
    if section.position_embedding_type == "rope" and model.kv_channels and not latent:
        if all(sizes) and section.max_position_embeddings:
            from megatron_ext.text.config.position_rules import rotary_errors

            windowed = run.section(AttentionConfig).window_size is not None
            yield from rotary_errors(section, model.kv_channels, windowed=windowed)


def _clip_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each flag with which ``--qk-clip`` does not go, if it is given."""
    attention = run.section(AttentionConfig)
    if attention.qk_clip:
        from megatron_ext.text.config.clip_rules import clip_errors

        yield from clip_errors(attention, run)


def _mask_errors(data: DataConfig, sft: SftConfig, transformer_impl: str) -> list[FlagError]:
    """Return an error for each flag that needs another attention mask than the causal one.

    Transformer Engine's layers support no other mask. Return [] if other layers are used.
    """
    if transformer_impl != "transformer_engine":
        return []
    errors = []
    if data.reset_attention_mask:
        errors.append(
            FlagError(
                "--reset-attention-mask",
                None,
                "needs masks that Transformer Engine's causal attention ignores",
                "use `--transformer-impl torch`",
            )
        )
    if sft.sft and sft.sft_batching != "padded":
        errors.append(
            FlagError(
                "--sft-batching",
                sft.sft_batching,
                "needs masks that Transformer Engine's causal attention ignores",
                "use padded, or `--transformer-impl torch`",
            )
        )
    return errors


def stored_text_model(stored: Mapping[str, Any], given: RunConfig) -> dict[str, Any]:
    """Return the fields that describe a checkpoint's GPT, by name of the section and the field.

    ``stored`` is the whole configuration in the checkpoint. ``given``, the run's configuration, is
    not used, but the interface `TaskFlags.stored_model` has it. Raise a ConfigError if the
    checkpoint holds another kind of model.
    """
    if stored.get("model", {}).get("blocks_dealt_by_cost"):
        raise ConfigError(
            "The checkpoint is of a model that this program does not train; give another "
            "checkpoint, or leave out `--use-checkpoint-args`."
        )
    keep = SHAPE.split()
    shapes = {
        section: {name: value for name, value in stored.get(section, {}).items() if name in keep}
        for section in SHAPE_SECTIONS
    }
    return {**shapes, "moe": stored["moe"], "lora": stored.get("lora", {})}


SHAPE_SECTIONS = {
    "model": ModelConfig,
    "positions": PositionConfig,
    "attention": AttentionConfig,
    "latent_attention": LatentAttentionConfig,
    "block": BlockConfig,
    "hybrid": HybridConfig,
    "mixer": MixerConfig,
}
"""The configuration sections that hold the fields of `SHAPE`: section name -> class."""
SHAPE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups "
    "group_query_attention max_position_embeddings position_embedding_type rotary_base "
    "rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling "
    "rope_scaling_factor rope_scaling rope_local_base_freq no_rope_freq window_size "
    "window_attn_skip_freq softmax_type softmax_scale attn_logit_softcapping "
    "attention_output_gate "
    "final_logit_softcapping normalization norm_epsilon apply_layernorm_1p swiglu squared_relu "
    "quick_geglu geglu openai_gelu activation_func_clamp_value glu_linear_offset add_bias_linear "
    "add_qkv_bias add_proj_bias add_mlp_bias qk_layernorm sandwich_norm embedding_multiplier "
    "reordered_norm qk_layernorm_all_heads qk_layernorm_after_rope norm_elementwise_affine "
    "norm_bias use_parallel_residual shared_input_norm "
    "xielu residual_multiplier logits_scaling llama_4_scaling_beta "
    "untie_embeddings_and_output_weights "
    "padded_vocab_size mtp_num_layers seq_length multi_latent_attention q_lora_rank kv_lora_rank "
    "qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor "
    "original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim "
    "latent_norm_epsilon hybrid_layer_pattern hybrid_attention_ratio hybrid_mlp_ratio "
    "experimental_attention_variant linear_attention_freq " + " ".join(SIZES)
)
"""Fields that determine what a GPT computes with its weights: names, separated by spaces.

`stored_text_model` restores them from a checkpoint. Fields of experts are not among them."""
