"""A run's flags as the fields of megatron-core's TransformerConfig."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

SAME_NAME = {
    "model": (
        "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups "
        "normalization add_bias_linear add_qkv_bias qk_layernorm attention_dropout hidden_dropout "
        "init_method_std embedding_init_method_std rotary_interleaved window_size "
        "window_attn_skip_freq softmax_type attention_softmax_in_fp32 "
        "apply_query_key_layer_scaling "
        "apply_residual_connection_post_layernorm fp32_residual_connection mtp_num_layers "
        "mtp_loss_scaling_factor use_cpu_initialization perform_initialization "
        "recompute_granularity recompute_method recompute_num_layers recompute_modules "
        "distribute_saved_activations variable_seq_lengths"
    ),
    "parallel": (
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "expert_model_parallel_size expert_tensor_parallel_size sequence_parallel "
        "virtual_pipeline_model_parallel_size account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split"
    ),
    "precision": "fp16 bf16",
    "training": "calculate_per_token_loss deterministic_mode",
}

APEX_KERNEL = "fused_weight_gradient_mlp_cuda"

OVERLAP = (
    "tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad "
    "tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_disable_qkv "
    "tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend hierarchical_context_parallel_sizes"
)

FP8 = (
    "fp8_recipe fp8_quantizer_factory fp8_margin fp8_amax_history_len fp8_amax_compute_algo "
    "fp8_wgrad tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 "
    "num_layers_at_end_in_bf16 moe_router_padding_for_quantization"
)

FUSIONS = (
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "cross_entropy_loss_fusion",
)

MOE_FUSIONS = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")


def transformer_fields(run: RunConfig) -> dict[str, object]:
    """Return values of TransformerConfig fields; dtypes and activations by name.

    Fused kernels are asked for only where they exist: on a GPU, and those of Transformer Engine
    with its layers; with ours, `layers.pointwise` compiles the same parts.
    """
    fields: dict[str, object] = {
        name: getattr(getattr(run, section), name)
        for section, names in SAME_NAME.items()
        for name in names.split()
    }
    model, parallel = run.model, run.parallel
    fields.update(
        layernorm_epsilon=model.norm_epsilon,
        layernorm_zero_centered_gamma=model.apply_layernorm_1p,
        gated_linear_unit=model.gated,
        activation_func=_activation(run),
        num_layers_in_first_pipeline_stage=parallel.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=parallel.decoder_last_pipeline_num_layers,
        cp_comm_type=parallel.cp_comm_type[0]
        if len(parallel.cp_comm_type) == 1
        else parallel.cp_comm_type,
        attention_backend=model.attention_backend,
        **_fusions(run),
        **_engine_fields(run),
    )
    if parallel.microbatch_group_size_per_vp_stage is not None:
        fields["microbatch_group_size_per_vp_stage"] = parallel.microbatch_group_size_per_vp_stage
    fields.update(_moe_fields(run))
    return fields


def _activation(run: RunConfig) -> str:
    model = run.model
    if model.swiglu:
        return "silu"
    if model.squared_relu:
        return "squared_relu"
    return "quick_gelu" if model.quick_geglu else "gelu"


def _fusions(run: RunConfig) -> dict[str, object]:
    model = run.model
    te = _with_engine(run)
    gpu = run.device == "cuda"
    wanted = {name: bool(getattr(model, name)) and te for name in FUSIONS}
    # The output head is megatron-core's own layer, whose kernel is apex's.
    wanted["gradient_accumulation_fusion"] &= find_spec(APEX_KERNEL) is not None
    wanted["bias_activation_fusion"] = gpu and te and _fuses_activation(run)
    wanted["bias_dropout_fusion"] = model.bias_dropout_fusion and (gpu or not te)
    impl = run.loss.cross_entropy_impl
    native = model.cross_entropy_loss_fusion and model.cross_entropy_fusion_impl == "native"
    wanted["cross_entropy_loss_fusion"] = gpu and (impl == "te" or (impl == "eager" and native))
    return {**wanted, "cross_entropy_fusion_impl": "te" if impl == "te" else "native"}


def _with_engine(run: RunConfig) -> bool:
    """Return whether Transformer Engine computes; a plan needs no installed one."""
    te = run.model.transformer_impl == "transformer_engine"
    return te and (not run.planning.dry_run or find_spec("transformer_engine") is not None)


def _fuses_activation(run: RunConfig) -> bool:
    """Return whether megatron-core's MLP takes its own compiled activation.

    It has SwiGLU, with a bias outside of experts only, and GELU with a bias outside of experts.
    """
    model, has_experts = run.model, run.moe.num_experts is not None
    if model.swiglu:
        return model.bias_swiglu_fusion and not (has_experts and model.add_bias_linear)
    is_gelu = not (model.squared_relu or model.quick_geglu)
    return model.bias_gelu_fusion and is_gelu and model.add_bias_linear and not has_experts


def _engine_fields(run: RunConfig) -> dict[str, object]:
    """Return fields of Transformer Engine's layers alone: 8-bit products, overlap, groups."""
    if run.model.transformer_impl != "transformer_engine":
        return {}
    fields: dict[str, object] = {name: getattr(run.engine, name) for name in OVERLAP.split()}
    if run.fp8.fp8_format is not None:
        fields.update({name: getattr(run.fp8, name) for name in FP8.split()})
        fields.update(fp8=run.fp8.fp8_format, fp8_param=run.fp8.fp8_param_gather)
    return fields


def _moe_fields(run: RunConfig) -> dict[str, object]:
    moe = run.moe
    if moe.num_experts is None:
        return {}
    te = _with_engine(run)
    fields: dict[str, object] = {
        name: value
        for name, value in dataclasses.asdict(moe).items()
        if name.startswith("moe_") and name not in MOE_FUSIONS
    }
    kinds = moe.moe_router_load_balancing_type
    weights = moe.moe_aux_loss_coeff
    fields.update(
        num_moe_experts=moe.num_experts,
        moe_layer_freq=moe.layer_pattern(),
        moe_router_load_balancing_type=kinds[0] if len(kinds) == 1 else kinds,
        moe_aux_loss_coeff=weights[0] if len(weights) == 1 else weights,
        **{name: bool(getattr(moe, name)) and te for name in MOE_FUSIONS},
    )
    return fields
