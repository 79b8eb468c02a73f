"""Rules of a model's layers, checked before ranks start and not when each rank builds layers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config.flags import must_divide
from megatron_ext.config.model import RECOMPUTED_WITH_TE, ModelConfig
from megatron_ext.config.moe import MoEConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.training import TrainingConfig

RECOMPUTED = ("core_attn", "mlp", "moe", "shared_experts")
RECOMPUTED_LATENT = "mla_up_proj"
CAPACITY_BALANCING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
TENSOR = "--tensor-model-parallel-size"


def build_errors(
    model: ModelConfig, moe: MoEConfig, parallel: ParallelConfig, training: TrainingConfig
) -> Iterator[str]:
    """Yield a sentence for each fault that keeps a text model from being built."""
    sizes = (model.num_layers, model.hidden_size, model.num_attention_heads)
    if model.blocks_dealt_by_cost:
        return
    yield from _recompute_errors(model, parallel)
    if not all(sizes):
        return
    yield from _width_errors(model, parallel)
    yield from _uneven_errors(model, parallel)
    if moe.num_experts is not None:
        yield from _expert_errors(moe, model, parallel)
        yield from _router_errors(moe)
        yield from _dispatch_errors(moe, parallel, training, model)


def _width_errors(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield a sentence for each matrix or number of heads that ranks cannot share equally."""
    tp = max(1, parallel.tensor_model_parallel_size)
    cp = parallel.context_parallel_size
    yield from must_divide("--ffn-hidden-size", model.ffn_hidden_size, TENSOR, tp)
    yield from must_divide("--padded-vocab-size", model.padded_vocab_size, TENSOR, tp)
    if cp <= 1 or model.transformer_impl == "transformer_engine":
        return
    heads = (model.num_attention_heads or 0) // tp
    if "a2a" in parallel.cp_comm_type and heads % cp:
        yield (
            f"`--cp-comm-type a2a` needs the attention heads of a tensor-parallel rank ({heads}) "
            f"to be divisible by `--context-parallel-size` ({cp}); use all_gather."
        )
    if "a2a+p2p" in parallel.cp_comm_type:
        yield (
            "`--cp-comm-type` (a2a+p2p) needs Transformer Engine's layers; use p2p, all_gather or "
            "a2a."
        )


def _uneven_errors(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield a sentence for each fault in the layers given for the first and last pipeline stage."""
    both = {
        "--decoder-first-pipeline-num-layers": parallel.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": parallel.decoder_last_pipeline_num_layers,
    }
    given = {name: count for name, count in both.items() if count is not None}
    stages = parallel.pipeline_model_parallel_size
    layers = model.num_layers or 0
    if not given or parallel.pipeline_model_parallel_layout is not None:
        return
    named = " and ".join(f"`{name}` ({count})" for name, count in given.items())
    if stages < 2:
        yield f"{named} needs `--pipeline-model-parallel-size` of at least 2; leave it out."
        return
    if parallel.counted_ends:
        yield (
            f"{named} does not go with `--account-for-embedding-in-pipeline-split` nor "
            "`--account-for-loss-in-pipeline-split`; give one of them."
        )
    between = stages - len(given)
    rest = layers - sum(given.values())
    fits = rest % between == 0 and rest > 0 if between else rest == 0
    if min(given.values()) < 1 or not fits:
        yield (
            f"{named} leaves {rest} of {layers} layers for {between} stages, which must share them "
            "equally, at least 1 each; choose others."
        )
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    per_stage = [*given.values(), *([rest // between] if between else [])]
    if fits and any(count % chunks for count in per_stage):
        yield (
            f"{named} gives stages of {', '.join(map(str, per_stage))} layers, which must be "
            f"divisible by the virtual chunks of a stage ({chunks}); choose others."
        )


def _recompute_errors(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    count = model.recompute_num_layers
    selective = model.recompute_granularity == "selective"
    if selective and count is not None:
        yield (
            f"`--recompute-num-layers` ({count}) goes with `--recompute-granularity full`; leave "
            "it out."
        )
    if model.recompute_granularity is None and model.recompute_method is not None:
        yield (
            f"`--recompute-method` ({model.recompute_method}) needs `--recompute-granularity "
            "full`; give both."
        )
    if model.distribute_saved_activations and parallel.sequence_parallel:
        yield (
            "`--distribute-saved-activations` does not go with `--sequence-parallel`, which cuts "
            "them already; leave it out."
        )
    given = model.recompute_modules or []
    modules = given if selective else []
    names = (*RECOMPUTED, RECOMPUTED_LATENT, *RECOMPUTED_WITH_TE)
    unknown = [name for name in given if name not in names]
    if unknown:
        yield f"`--recompute-modules` ({' '.join(unknown)}) must be names among {', '.join(names)}."
    if RECOMPUTED_LATENT in modules and not model.multi_latent_attention:
        yield (
            f"`--recompute-modules` ({RECOMPUTED_LATENT}) needs `--multi-latent-attention`; use "
            f"{', '.join(RECOMPUTED)}."
        )
    with_te = [name for name in modules if name in RECOMPUTED_WITH_TE]
    if with_te and model.transformer_impl != "transformer_engine":
        yield (
            f"`--recompute-modules` ({with_te[0]}) needs Transformer Engine's layers; use "
            f"{', '.join(RECOMPUTED)}."
        )


def _expert_errors(moe: MoEConfig, model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield a sentence for each fault in the sizes of experts, or in which layers have them."""
    tp = max(1, parallel.tensor_model_parallel_size)
    etp = parallel.expert_tensor_parallel_size or tp
    width = moe.moe_ffn_hidden_size
    shared_width = moe.moe_shared_expert_intermediate_size
    yield from must_divide("--moe-ffn-hidden-size", width, "--expert-tensor-parallel-size", etp)
    yield from must_divide("--moe-shared-expert-intermediate-size", shared_width, TENSOR, tp)
    if model.add_bias_linear and shared_width:
        yield "Experts with biases do not go with a shared expert; give `--disable-bias-linear`."
    elif model.add_bias_linear and etp > 1:
        yield (
            f"Experts with biases do not go with `--expert-tensor-parallel-size` ({etp}); give "
            "`--expert-tensor-parallel-size 1` or `--disable-bias-linear`."
        )
    if model.add_mlp_bias and not model.add_bias_linear:
        yield (
            "`--add-mlp-bias` gives biases to dense MLPs, not to experts; leave it out, or use "
            "`--add-bias-linear`, which gives them to all layers."
        )
    try:
        pattern = moe.layer_pattern()
    except ValueError:
        return  # said by the section itself
    if isinstance(pattern, list) and len(pattern) != model.num_layers:
        yield (
            f"`--moe-layer-freq` has {len(pattern)} entries, but must have one for each of the "
            f"{model.num_layers} layers."
        )
    if isinstance(pattern, int) and pattern < 1:
        yield f"`--moe-layer-freq` ({pattern}) must be at least 1; use 1."


def _router_errors(moe: MoEConfig) -> Iterator[str]:
    kinds = moe.moe_router_load_balancing_type
    weights = moe.moe_aux_loss_coeff
    if len(kinds) != len(weights):
        yield (
            f"`--moe-aux-loss-coeff` has {len(weights)} value(s), but "
            f"`--moe-router-load-balancing-type` has {len(kinds)}; give one for each."
        )
    if "sinkhorn" in kinds and any(weights):
        yield (
            f"`--moe-aux-loss-coeff` ({' '.join(f'{x:g}' for x in weights)}) must be 0 with "
            "`--moe-router-load-balancing-type sinkhorn`; leave it out."
        )
    softmax = moe.moe_router_score_function == "softmax"
    if moe.moe_router_enable_expert_bias and moe.moe_router_score_function != "sigmoid":
        yield (
            "`--moe-router-enable-expert-bias` needs `--moe-router-score-function sigmoid`; give "
            "both."
        )
    one = moe.moe_router_topk == 1 and kinds != ["sinkhorn"]
    if one and softmax and not moe.moe_router_pre_softmax:
        yield (
            "`--moe-router-topk` (1) with a softmax over one expert has no gradient; give "
            "`--moe-router-pre-softmax`."
        )
    chosen = moe.moe_router_group_topk
    groups = moe.moe_router_num_groups
    if chosen is None:
        if moe.moe_router_group_scores is not None:
            yield (
                f"`--moe-router-group-scores` ({moe.moe_router_group_scores}) needs "
                "`--moe-router-group-topk`; give both."
            )
        return
    if not groups:
        yield f"`--moe-router-group-topk` ({chosen}) needs `--moe-router-num-groups`; give both."
        return
    yield from must_divide("--num-experts", moe.num_experts, "--moe-router-num-groups", groups)
    if not 1 <= chosen <= groups:
        yield (
            f"`--moe-router-group-topk` ({chosen}) must be between 1 and `--moe-router-num-groups` "
            f"({groups})."
        )
    ranked = moe.moe_router_group_scores
    group_size = (moe.num_experts or 0) // groups
    if ranked is not None and ranked > group_size:
        yield (
            f"`--moe-router-group-scores` ({ranked}) must be at most the experts of a group "
            f"({group_size}); use {group_size} or less."
        )
    if ranked is not None and moe.moe_router_fusion:
        yield (
            "`--moe-router-fusion` ranks groups as Megatron-LM does; leave it out with "
            "`--moe-router-group-scores`."
        )


def _dispatch_errors(
    moe: MoEConfig, parallel: ParallelConfig, training: TrainingConfig, model: ModelConfig
) -> Iterator[str]:
    """Yield a sentence for each fault in how tokens are sent to experts."""
    tp = parallel.tensor_model_parallel_size
    if tp > 1 and not parallel.sequence_parallel and not training.skip_train:
        yield (
            f"Training `--num-experts` with `--tensor-model-parallel-size` ({tp}) needs "
            "`--sequence-parallel`; give it."
        )
    capacity = moe.moe_expert_capacity_factor
    wrong = [x for x in moe.moe_router_load_balancing_type if x not in CAPACITY_BALANCING]
    if capacity is not None and wrong:
        yield (
            f"`--moe-expert-capacity-factor` ({capacity:g}) does not go "
            f"with `--moe-router-load-balancing-type {wrong[0]}`; use aux_loss."
        )
    if capacity is None and moe.moe_pad_expert_input_to_capacity:
        yield (
            "`--moe-pad-expert-input-to-capacity` needs `--moe-expert-capacity-factor`; give both."
        )
    if moe.moe_layer_recompute and model.recompute_granularity == "full":
        yield (
            "`--moe-layer-recompute` has no effect beside `--recompute-granularity full`; leave "
            "one out."
        )
    if moe.moe_apply_probs_on_input and moe.moe_router_topk != 1:
        yield (
            f"`--moe-apply-probs-on-input` needs `--moe-router-topk` ({moe.moe_router_topk}) to be "
            "1; leave it out."
        )
