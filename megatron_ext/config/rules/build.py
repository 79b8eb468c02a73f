"""Rules of layers that each rank would find only when it builds them, told before ranks start."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

RECOMPUTED = ("core_attn", "mlp", "moe", "shared_experts")
RECOMPUTED_WITH_TE = ("layernorm", "moe_act", "mla_up_proj")
CAPACITY_BALANCING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}


def build_errors(run: RunConfig) -> list[str]:
    """Return a sentence for everything that cannot be built of a text model with given sizes."""
    model = run.model
    sizes = (model.num_layers, model.hidden_size, model.num_attention_heads)
    if run.model.blocks_dealt_by_cost or not all(sizes):
        return []
    found = [*_width_errors(run), *_uneven_errors(run), *_recompute_errors(run)]
    if run.moe.num_experts is not None:
        found += [*_expert_errors(run), *_router_errors(run), *_dispatch_errors(run)]
    return found


def _must_divide(name: str, value: int | None, by: str, size: int) -> list[str]:
    if not value or size < 1 or value % size == 0:
        return []
    return [
        f"`{name}` ({value}) must be divisible by `{by}` ({size}); use {-(-value // size) * size}."
    ]


def _width_errors(run: RunConfig) -> list[str]:
    """Return a sentence for each matrix or number of heads that the ranks cannot share."""
    model, parallel = run.model, run.parallel
    tp, cp = max(1, parallel.tensor_model_parallel_size), parallel.context_parallel_size
    by = "--tensor-model-parallel-size"
    found = _must_divide("--ffn-hidden-size", model.ffn_hidden_size, by, tp)
    found += _must_divide("--padded-vocab-size", model.padded_vocab_size, by, tp)
    heads = (model.num_attention_heads or 0) // tp
    torch_layers = model.transformer_impl != "transformer_engine"
    if cp > 1 and "a2a" in parallel.cp_comm_type and torch_layers and heads % cp:
        found.append(
            f"`--cp-comm-type a2a` needs the attention heads of a tensor-parallel rank ({heads}) "
            f"to be divisible by `--context-parallel-size` ({cp}); use all_gather."
        )
    if torch_layers and cp > 1 and "a2a+p2p" in parallel.cp_comm_type:
        found.append(
            "`--cp-comm-type` (a2a+p2p) needs Transformer Engine's layers; use p2p, all_gather or "
            "a2a."
        )
    return found


def _uneven_errors(run: RunConfig) -> list[str]:
    """Return a sentence for each wrong length of the first and last stages."""
    model, parallel = run.model, run.parallel
    first, last = (
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
    )
    both = {
        "--decoder-first-pipeline-num-layers": first,
        "--decoder-last-pipeline-num-layers": last,
    }
    given = {name: count for name, count in both.items() if count is not None}
    stages, layers = parallel.pipeline_model_parallel_size, model.num_layers or 0
    if not given or parallel.pipeline_model_parallel_layout is not None:
        return []
    named = " and ".join(f"`{name}` ({count})" for name, count in given.items())
    if stages < 2:
        return [f"{named} needs `--pipeline-model-parallel-size` of at least 2; leave it out."]
    found = []
    accounts = (
        parallel.account_for_embedding_in_pipeline_split
        or parallel.account_for_loss_in_pipeline_split
    )
    if accounts:
        found.append(
            f"{named} does not go with `--account-for-embedding-in-pipeline-split` nor "
            "`--account-for-loss-in-pipeline-split`; give one of them."
        )
    between, rest = stages - len(given), layers - sum(given.values())
    fits = rest % between == 0 and rest > 0 if between else rest == 0
    if min(given.values()) < 1 or not fits:
        found.append(
            f"{named} leaves {rest} of {layers} layers for {between} stages, which must share them "
            "equally, at least 1 each; choose others."
        )
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    per_stage = [*given.values(), *([rest // between] if between else [])]
    if fits and any(count % chunks for count in per_stage):
        found.append(
            f"{named} gives stages of {', '.join(map(str, per_stage))} layers, which must be "
            f"divisible by the virtual chunks of a stage ({chunks}); choose others."
        )
    return found


def _recompute_errors(run: RunConfig) -> list[str]:
    model, found = run.model, list[str]()
    count = model.recompute_num_layers
    if model.recompute_granularity == "selective" and count is not None:
        found.append(
            f"`--recompute-num-layers` ({count}) goes with `--recompute-granularity full`; leave "
            "it out."
        )
    if model.recompute_granularity is None and model.recompute_method is not None:
        found.append(
            f"`--recompute-method` ({model.recompute_method}) needs `--recompute-granularity "
            "full`; give both."
        )
    if model.distribute_saved_activations and run.parallel.sequence_parallel:
        found.append(
            "`--distribute-saved-activations` does not go with `--sequence-parallel`, which cuts "
            "them already; leave it out."
        )
    if model.recompute_granularity == "selective":
        found += _recomputed_modules(run)
    return found


def _recomputed_modules(run: RunConfig) -> list[str]:
    modules = run.model.recompute_modules or []
    known = (*RECOMPUTED, *RECOMPUTED_WITH_TE)
    unknown = [name for name in modules if name not in known]
    found = []
    if unknown:
        found.append(
            f"`--recompute-modules` ({' '.join(unknown)}) must be names among {', '.join(known)}."
        )
    with_te = [name for name in modules if name in RECOMPUTED_WITH_TE]
    if with_te and run.model.transformer_impl != "transformer_engine":
        found.append(
            f"`--recompute-modules` ({with_te[0]}) needs Transformer Engine's layers; use "
            f"{', '.join(RECOMPUTED)}."
        )
    return found


def _expert_errors(run: RunConfig) -> list[str]:
    """Return a sentence for each wrong size of the experts."""
    moe, model, parallel = run.moe, run.model, run.parallel
    tp = max(1, parallel.tensor_model_parallel_size)
    etp = parallel.expert_tensor_parallel_size or tp
    found = _must_divide(
        "--moe-ffn-hidden-size", moe.moe_ffn_hidden_size, "--expert-tensor-parallel-size", etp
    )
    shared = moe.moe_shared_expert_intermediate_size
    found += _must_divide(
        "--moe-shared-expert-intermediate-size", shared, "--tensor-model-parallel-size", tp
    )
    if model.add_bias_linear and (shared or etp > 1):
        what = "a shared expert" if shared else f"`--expert-tensor-parallel-size` ({etp})"
        found.append(f"Experts with biases do not go with {what}; give `--disable-bias-linear`.")
    try:
        pattern = moe.layer_pattern()
    except ValueError:
        return found  # said by the section itself
    if isinstance(pattern, list) and len(pattern) != model.num_layers:
        found.append(
            f"`--moe-layer-freq` has {len(pattern)} entries, but must have one for each of the "
            f"{model.num_layers} layers."
        )
    if isinstance(pattern, int) and pattern < 1:
        found.append(f"`--moe-layer-freq` ({pattern}) must be at least 1; use 1.")
    return found


def _router_errors(run: RunConfig) -> list[str]:
    moe, found = run.moe, list[str]()
    kinds, weights = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    if len(kinds) != len(weights):
        found.append(
            f"`--moe-aux-loss-coeff` has {len(weights)} value(s), but "
            f"`--moe-router-load-balancing-type` has {len(kinds)}; give one for each."
        )
    if "sinkhorn" in kinds and any(weights):
        found.append(
            f"`--moe-aux-loss-coeff` ({' '.join(f'{x:g}' for x in weights)}) must be 0 with "
            "`--moe-router-load-balancing-type sinkhorn`; leave it out."
        )
    if moe.moe_router_enable_expert_bias and moe.moe_router_score_function != "sigmoid":
        found.append(
            "`--moe-router-enable-expert-bias` needs `--moe-router-score-function sigmoid`; give "
            "both."
        )
    if (
        moe.moe_router_topk == 1
        and moe.moe_router_score_function == "softmax"
        and not moe.moe_router_pre_softmax
        and kinds != ["sinkhorn"]
    ):
        found.append(
            "`--moe-router-topk` (1) with a softmax over one expert has no gradient; give "
            "`--moe-router-pre-softmax`."
        )
    return [*found, *_group_errors(run)]


def _group_errors(run: RunConfig) -> list[str]:
    """Return a sentence for each wrong number of groups of experts."""
    moe = run.moe
    chosen, groups = moe.moe_router_group_topk, moe.moe_router_num_groups
    if chosen is None:
        return []
    if not groups:
        return [f"`--moe-router-group-topk` ({chosen}) needs `--moe-router-num-groups`; give both."]
    found = _must_divide("--num-experts", moe.num_experts, "--moe-router-num-groups", groups)
    if not 1 <= chosen <= groups:
        found.append(
            f"`--moe-router-group-topk` ({chosen}) must be between 1 and `--moe-router-num-groups` "
            f"({groups})."
        )
    return found


def _dispatch_errors(run: RunConfig) -> list[str]:
    """Return a sentence for each dispatch of tokens to experts that cannot be had."""
    moe, parallel, found = run.moe, run.parallel, list[str]()
    tp = parallel.tensor_model_parallel_size
    if tp > 1 and not parallel.sequence_parallel and not run.training.skip_train:
        found.append(
            f"Training `--num-experts` with `--tensor-model-parallel-size` ({tp}) needs "
            "`--sequence-parallel`; give it."
        )
    if moe.moe_expert_capacity_factor is not None:
        wrong = [x for x in moe.moe_router_load_balancing_type if x not in CAPACITY_BALANCING]
        if wrong:
            found.append(
                f"`--moe-expert-capacity-factor` ({moe.moe_expert_capacity_factor:g}) does not go "
                f"with `--moe-router-load-balancing-type {wrong[0]}`; use aux_loss."
            )
    elif moe.moe_pad_expert_input_to_capacity:
        found.append(
            "`--moe-pad-expert-input-to-capacity` needs `--moe-expert-capacity-factor`; give both."
        )
    if moe.moe_layer_recompute and run.model.recompute_granularity == "full":
        found.append(
            "`--moe-layer-recompute` has no effect beside `--recompute-granularity full`; leave "
            "one out."
        )
    if moe.moe_apply_probs_on_input and moe.moe_router_topk != 1:
        found.append(
            f"`--moe-apply-probs-on-input` needs `--moe-router-topk` ({moe.moe_router_topk}) to be "
            "1; leave it out."
        )
    return found
