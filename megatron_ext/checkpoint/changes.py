"""Which flags may differ between the run that saved a checkpoint and the run that loads it.

Shapes and names of weights tell most differences between two models (`fit.py`). What they do not
tell is listed here, flag by flag, so that none changes what a model computes without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import CheckpointError

MODEL, SETTING, KEPT, SAID, FREE = "model", "setting", "kept", "said", "free"
"""What becomes of a flag that differs.

MODEL: the weights mean something else, so it is refused. SETTING: the model computes something else
with them; refused where a run goes on, said where one starts from the weights. KEPT: the
optimizer goes on with the checkpoint's value, which is said. SAID: the new value counts, which is
said where a run goes on. FREE: it changes no result, is checked elsewhere, or is meant to change.
"""

WHOLE = {
    **dict.fromkeys(
        "parallel cuda_graphs engine sample streaming_sample checkpoint logging planning".split(),
        FREE,
    ),
    **dict.fromkeys("sft flow conditions text_dropout codec text_encoder encode".split(), SAID),
}
"""Sections whose flags share an answer."""

_ANSWERS: dict[str, dict[str, str]] = {
    "model": {
        MODEL: "num_attention_heads kv_channels group_query_attention num_query_groups "
        "position_embedding_type rotary_percent rotary_interleaved normalization "
        "apply_layernorm_1p swiglu squared_relu quick_geglu softmax_type "
        "apply_residual_connection_post_layernorm",
        SETTING: "rotary_base rotary_seq_len_interpolation_factor use_rope_scaling "
        "rope_scaling_factor norm_epsilon window_size window_attn_skip_freq",
        SAID: "seq_length attention_dropout hidden_dropout deterministic_dropout "
        "fp32_residual_connection mtp_loss_scaling_factor padded_vocab_size",
        FREE: "num_layers hidden_size ffn_hidden_size max_position_embeddings "
        "make_vocab_size_divisible_by add_bias_linear add_qkv_bias qk_layernorm "
        "untie_embeddings_and_output_weights mtp_num_layers init_method_std "
        "embedding_init_method_std init_method_xavier_uniform use_cpu_initialization "
        "perform_initialization transformer_impl attention_backend attention_softmax_in_fp32 "
        "apply_query_key_layer_scaling recompute_granularity recompute_method "
        "recompute_num_layers recompute_modules distribute_saved_activations "
        "masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion "
        "apply_rope_fusion gradient_accumulation_fusion persist_layer_norm "
        "cross_entropy_loss_fusion cross_entropy_fusion_impl compile",
    },
    "moe": {
        SETTING: "moe_router_topk moe_router_score_function moe_router_pre_softmax "
        "moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor "
        "moe_apply_probs_on_input",
        SAID: "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff "
        "moe_input_jitter_eps moe_router_dtype moe_router_bias_update_rate "
        "moe_router_force_load_balancing moe_expert_capacity_factor "
        "moe_pad_expert_input_to_capacity moe_token_drop_policy",
        FREE: "num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size "
        "moe_shared_expert_gate moe_router_enable_expert_bias moe_token_dispatcher_type "
        "moe_layer_recompute moe_grouped_gemm moe_permute_fusion moe_router_fusion",
    },
    "lora": {
        SETTING: "lora_alpha lora_rslora",
        SAID: "lora_dropout",
        FREE: "lora_rank lora_target_modules",
    },
    "precision": {
        SAID: "bf16 fp16 accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16",
        FREE: "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    },
    "fp8": {
        SAID: "fp8_format fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo "
        "fp8_wgrad fp8_quantizer_factory tp_only_amax_red first_last_layers_bf16 "
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        FREE: "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag "
        "moe_router_padding_for_quantization",
    },
    "training": {
        SAID: "global_batch_size rampup_batch_size step_batch_size_schedule seed "
        "data_parallel_random_init calculate_per_token_loss",
        FREE: "micro_batch_size decrease_batch_size_if_needed train_iters train_samples "
        "train_epochs exit_interval exit_duration_in_mins exit_signal_handler exit_signal "
        "skip_train deterministic_mode check_invariants manual_gc manual_gc_interval "
        "manual_gc_eval empty_unused_memory_level eval_iters eval_interval full_validation "
        "early_stop_patience early_stop_min_delta profile profile_step_start profile_step_end "
        "profile_ranks",
    },
    "loss": {
        SAID: "loss_reduction label_smoothing z_loss_coeff loss loss_args ignore_index",
        FREE: "cross_entropy_impl cross_entropy_chunk_size",
    },
    "optimizer": {
        KEPT: "adam_beta1 adam_beta2 adam_eps sgd_momentum",
        SAID: "clip_grad lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples "
        "apply_wd_to_qk_layernorm",
        # The schedule compares its own, `fit.py` the kinds of optimizers.
        FREE: "optimizer lr min_lr lr_decay_style lr_decay_iters lr_decay_samples "
        "lr_warmup_fraction lr_warmup_iters lr_warmup_samples decoupled_lr decoupled_min_lr "
        "weight_decay start_weight_decay end_weight_decay weight_decay_incr_style "
        "use_distributed_optimizer overlap_grad_reduce overlap_param_gather align_grad_reduce "
        "align_param_gather ddp_bucket_size ddp_num_buckets ddp_average_in_collective "
        "log_num_zeros_in_grad override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
    },
    "ema": {SAID: "ema_decay ema_start ema_update_every", FREE: "eval_ema"},
    "data": {
        SAID: "data_path split train_data_path valid_data_path test_data_path data_args_path "
        "per_split_data_args_path per_dataset_sequences_path mock_data dataloader_type "
        "data_sharding reset_position_ids reset_attention_mask eod_mask_loss "
        "allow_ambiguous_pad_tokens",
        FREE: "data_cache_path mmap_bin_files multiple_validation_sets num_workers "
        "num_dataset_builder_threads mid_level_dataset_surplus",
    },
    "tokenizer": {
        SAID: "tokenizer_type tokenizer_model tokenizer_special_tokens vocab_file merge_file "
        "vocab_size vocab_extra_ids tiktoken_pattern tiktoken_num_special_tokens "
        "tiktoken_special_tokens tokenizer_sentencepiece_legacy "
        "tokenizer_hf_include_special_tokens",
        FREE: "tokenizer_metadata tokenizer_hf_use_fast trust_remote_code",
    },
    "video": {
        SETTING: "task",
        SAID: "video_data_path online_encoding video_valid_path video_buckets mixed_buckets",
        FREE: "video_model",
    },
    "mmdit": {
        MODEL: "axes_dim",
        SAID: "guidance",
        FREE: "mmdit_size num_double_blocks num_single_blocks patch_size mlp_ratio guidance_embed "
        "adaln_zero recompute_double_blocks recompute_single_blocks double_block_cost",
    },
    "video_dit": {SETTING: "independent_block_timesteps", FREE: "video_dit_size"},
    "streaming": {
        SAID: "critic_checkpoint teacher_checkpoint prompts_path second_prompts_path "
        "negative_prompt latent_size frame_block window_frames sink_frames chunk_frames "
        "min_new_frames max_new_frames sequence_lengths train_first_chunk switch_frames "
        "recache_frames sink_at_switch same_exit_across_blocks last_step_only two_phase "
        "encode_first_frame decode_history generator_interval timestep_shift denoising_steps "
        "warp_denoising_steps min_timestep max_timestep context_noise context_noise_from_table "
        "guidance_scale critic_lr critic_clip_grad denoising_loss distribution_loss sid_alpha "
        "ts_schedule ts_schedule_max",
        FREE: "generator_size critic_size teacher_size teacher_tensor_model_parallel_size "
        "teacher_pipeline_model_parallel_size zero_head recompute_blocks latent_channels",
    },
}
ANSWERS = {
    section: {name: answer for answer, names in lists.items() for name in names.split()}
    for section, lists in _ANSWERS.items()
}
"""The answer for each flag of the other sections."""


@dataclass(frozen=True)
class Change:
    """A flag whose value is not the checkpoint's."""

    name: str
    value: Any
    before: Any
    answer: str

    def __str__(self) -> str:
        dashed = self.name.replace("_", "-")
        if isinstance(self.value, bool):
            return f"`--{'' if self.value else 'no-'}{dashed}`"
        return f"`--{dashed}` ({_shown(self.value)}, before {_shown(self.before)})"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def changes(run: Mapping[str, Any], stored: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the flags that differ, but for those that may.

    Args:
        run: sections of plain values of the run that loads.
        stored: those of the run that saved; what it does not hold is not compared.
    """
    for section, values in run.items():
        before = stored.get(section)
        if not isinstance(values, Mapping) or not isinstance(before, Mapping):
            continue
        if section == "lora" and None in (values["lora_rank"], before.get("lora_rank")):
            # Whether there are adapters the names of the weights tell.
            continue
        # A user's own sections are said too; fields that are no flags follow from others.
        usual = WHOLE.get(section) or (FREE if section in ANSWERS else SAID)
        answers = ANSWERS.get(section, {})
        for name in values.keys() & before.keys():
            answer = answers.get(name, usual)
            if name.startswith("rotary") and values["position_embedding_type"] != "rope":
                continue
            if answer != FREE and values[name] != before[name]:
                yield Change(name, values[name], before[name], answer)


def check_changes(
    path: Path,
    run: Mapping[str, Any],
    stored: Mapping[str, Any],
    *,
    weights_only: bool,
    optimizer: str | None,
) -> list[str]:
    """Compare the flags of a run with those of the checkpoint that it loads.

    Args:
        path: the checkpoint.
        run: see `changes`.
        stored: see `changes`.
        weights_only: the run starts from the weights, and does not go on.
        optimizer: ``--optimizer`` of a run that goes on with the checkpoint's; else None.

    Returns:
        Sentences about what differs and is said.

    Raises:
        CheckpointError: the model would compute something else with the weights.
    """
    found = sorted(changes(run, stored), key=lambda change: change.name)
    told = {answer: [x for x in found if x.answer == answer] for answer in (MODEL, SETTING)}
    refused = told[MODEL] if weights_only else [*told[MODEL], *told[SETTING]]
    if refused:
        anew = "" if told[MODEL] else ", or `--finetune` to start from its weights with yours"
        raise CheckpointError(
            f"{path} holds a model with other flags than {_listed(refused)}, which would compute "
            f"something else with its weights; give the flags that it was saved with{anew}."
        )
    if optimizer is not None:
        _check_optimizer(path, run["optimizer"], stored.get("optimizer", {}))
    kept = [x for x in found if x.answer == KEPT and x.name.startswith(f"{optimizer}_")]
    said = told[SETTING] if weights_only else [x for x in found if x.answer == SAID]
    notes = []
    if kept:
        notes.append(
            f"The optimizer goes on with the settings of {path}, not with {_listed(kept)}; "
            "`--no-load-optim` starts it anew with yours."
        )
    if said:
        notes.append(
            f"Flags that differ from those of {path}, and count from here: {_listed(said)}."
        )
    return notes


def _check_optimizer(path: Path, run: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Refuse state of another kind of optimizer, or of other groups of parameters."""
    momentum = run["sgd_momentum"] if run["optimizer"] == "sgd" else None
    for name, differs in (
        ("optimizer", run["optimizer"] != stored.get("optimizer", run["optimizer"])),
        (
            "decoupled_lr",
            (run["decoupled_lr"] is None)
            != (stored.get("decoupled_lr", run["decoupled_lr"]) is None),
        ),
        (
            "sgd_momentum",
            momentum is not None and bool(momentum) != bool(stored.get("sgd_momentum", momentum)),
        ),
    ):
        if differs:
            dashed = name.replace("_", "-")
            raise CheckpointError(
                f"`--{dashed}` ({run[name]}) does not go with the optimizer state of {path}, saved "
                f"with {stored[name]}; use that, or give `--no-load-optim`."
            )


def _listed(found: list[Change]) -> str:
    return ", ".join(map(str, found))
