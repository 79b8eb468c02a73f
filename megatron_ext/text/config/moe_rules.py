"""Rules of the flags of experts, for models that have them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config.flags import must_divide
from megatron_ext.config.lora_targets import adapts
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.config.training import TrainingConfig
from megatron_ext.errors import FlagError, exclusive
from megatron_ext.text.config.moe import PADDING, MoEConfig, pads_for_quantization

CAPACITY_BALANCING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
TENSOR = "--tensor-model-parallel-size"
ROUTED_LAYERS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
"""The kinds of the linear layers of routed experts."""


def expert_errors(moe: MoEConfig, config: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each wrong flag of experts, and each flag that experts do not support."""
    assert moe.num_experts is not None
    model = config.model
    size = "--expert-model-parallel-size"
    ranks = max(1, config.parallel.expert_model_parallel_size)
    yield from must_divide("--num-experts", moe.num_experts, size, ranks)
    if not 1 <= moe.moe_router_topk <= moe.num_experts:
        yield FlagError(
            "--moe-router-topk",
            moe.moe_router_topk,
            f"must be between 1 and `--num-experts` ({moe.num_experts})",
        )
    try:
        moe.layer_pattern()
    except ValueError:
        yield FlagError(
            "--moe-layer-freq",
            moe.moe_layer_freq,
            "must be a number or a list of 0 and 1",
            "use 1 to give every layer experts",
        )
    if model.num_layers and model.hidden_size and model.num_attention_heads:
        yield from _layer_errors(moe, model, config.parallel)
        yield from _router_errors(moe)
        yield from _dispatch_errors(moe, config.parallel, config.training, model)
    yield from _adapter_errors(config)
    yield from _fp8_errors(moe, config)
    if {moe.moe_dispatch_fwd_dtype, moe.moe_combine_bwd_dtype} != {"bf16"}:
        from megatron_ext.text.config.flex import format_errors, values_of

        yield from format_errors(values_of(moe, config))
    if config.cuda_graphs.cuda_graph_impl == "local":
        yield FlagError(
            "--cuda-graph-impl local",
            None,
            "does not go with `--num-experts`, whose experts get any number of tokens",
        )


def _fp8_errors(moe: MoEConfig, config: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each flag that prevents experts from computing in 8 bits."""
    if config.fp8.fp8_format is None:
        return
    from megatron_ext.config.rules.fp8 import side_errors

    dispatcher = moe.moe_token_dispatcher_type
    if pads_for_quantization(config) and dispatcher == "allgather":
        yield FlagError(
            PADDING,
            None,
            f"does not go with `--moe-token-dispatcher-type` ({dispatcher})",
            "use alltoall",
        )
    tp = config.parallel.tensor_model_parallel_size
    etp = config.parallel.expert_tensor_parallel_size or tp
    shared = moe.moe_shared_expert_intermediate_size
    sides = [
        ("--moe-ffn-hidden-size", moe.moe_ffn_hidden_size, etp),
        ("--moe-shared-expert-intermediate-size", shared, tp),
        ("--moe-latent-size", moe.moe_latent_size, 1),
    ]
    yield from side_errors(config.fp8, sides)


def _adapter_errors(config: RunConfig) -> Iterator[FlagError]:
    """Yield an error if ranks that share an expert would drop different inputs of its adapter."""
    lora = config.lora
    parallel = config.parallel
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    if lora.lora_dropout and etp > 1 and any(adapts(lora, layer) for layer in ROUTED_LAYERS):
        yield FlagError(
            "--lora-dropout",
            lora.lora_dropout,
            f"on experts does not go with `--expert-tensor-parallel-size` ({etp}), whose ranks "
            "would drop different inputs of one expert",
            "give `--expert-tensor-parallel-size 1`, or no dropout",
        )


def _layer_errors(
    moe: MoEConfig, model: ModelConfig, parallel: ParallelConfig
) -> Iterator[FlagError]:
    """Yield an error for each wrong width or bias of experts, and a wrong ``--moe-layer-freq``."""
    tp = max(1, parallel.tensor_model_parallel_size)
    etp = parallel.expert_tensor_parallel_size or tp
    width = moe.moe_ffn_hidden_size
    shared_width = moe.moe_shared_expert_intermediate_size
    yield from must_divide("--moe-ffn-hidden-size", width, "--expert-tensor-parallel-size", etp)
    yield from must_divide("--moe-shared-expert-intermediate-size", shared_width, TENSOR, tp)
    if moe.moe_latent_size is not None:
        yield from _latent_errors(moe, model)
    if model.add_bias_linear and shared_width:
        yield FlagError(
            "Experts with biases",
            None,
            "do not go with a shared expert",
            "give `--disable-bias-linear`",
        )
    elif model.add_bias_linear and etp > 1:
        yield FlagError(
            "Experts with biases",
            None,
            f"do not go with `--expert-tensor-parallel-size` ({etp})",
            "give `--expert-tensor-parallel-size 1` or `--disable-bias-linear`",
        )
    if model.add_mlp_bias and not model.add_bias_linear:
        yield FlagError(
            "--add-mlp-bias",
            None,
            "gives biases to dense MLPs, not to experts",
            "leave it out, or use `--add-bias-linear`, which gives them to all layers",
        )
    try:
        pattern = moe.layer_pattern()
    except ValueError:
        return  # said by the section itself
    if isinstance(pattern, list) and len(pattern) != model.num_layers:
        yield FlagError(
            "--moe-layer-freq",
            None,
            f"has {len(pattern)} entries, but must have one for each of the {model.num_layers} "
            "layers",
        )
    if isinstance(pattern, int) and pattern < 1:
        yield FlagError("--moe-layer-freq", pattern, "must be at least 1", "use 1")


def _latent_errors(moe: MoEConfig, model: ModelConfig) -> Iterator[FlagError]:
    """Yield an error for each flag that does not go with experts on small vectors."""
    name = "--moe-latent-size"
    if moe.moe_shared_expert_overlap:
        yield exclusive("--moe-shared-expert-overlap", name)
    if model.add_bias_linear:
        yield FlagError(
            name,
            moe.moe_latent_size,
            "needs projections without biases",
            "give `--disable-bias-linear`",
        )


def _router_errors(moe: MoEConfig) -> Iterator[FlagError]:
    kinds = moe.moe_router_load_balancing_type
    weights = moe.moe_aux_loss_coeff
    if len(kinds) != len(weights):
        yield FlagError(
            "--moe-aux-loss-coeff",
            None,
            f"has {len(weights)} value(s), but `--moe-router-load-balancing-type` has {len(kinds)}",
            "give one for each",
        )
    if "sinkhorn" in kinds and any(weights):
        yield FlagError(
            "--moe-aux-loss-coeff",
            " ".join(f"{x:g}" for x in weights),
            "must be 0 with `--moe-router-load-balancing-type sinkhorn`",
            "leave it out",
        )
    softmax = moe.moe_router_score_function == "softmax"
    after_softmax = softmax and not moe.moe_router_pre_softmax
    if moe.moe_router_enable_expert_bias and after_softmax:
        yield FlagError(
            "--moe-router-enable-expert-bias",
            None,
            "needs `--moe-router-score-function sigmoid` or `--moe-router-pre-softmax`",
            "give one of them",
        )
    one = moe.moe_router_topk == 1 and kinds != ["sinkhorn"]
    if one and after_softmax:
        yield FlagError(
            "--moe-router-topk",
            "1",
            "with a softmax over one expert has no gradient",
            "give `--moe-router-pre-softmax`",
        )
    if one and softmax and moe.moe_router_norm_topk_prob:
        yield FlagError(
            "--moe-router-norm-topk-prob",
            None,
            "makes the weight of a single expert 1, which has no gradient "
            "(`--moe-router-topk` is 1)",
            "leave it out",
        )
    yield from _fused_router_errors(moe)
    chosen = moe.moe_router_group_topk
    groups = moe.moe_router_num_groups
    if chosen is None:
        if moe.moe_router_group_scores is not None:
            yield FlagError(
                "--moe-router-group-scores",
                moe.moe_router_group_scores,
                "needs `--moe-router-group-topk`",
                "give both",
            )
        return
    if not groups:
        yield FlagError(
            "--moe-router-group-topk", chosen, "needs `--moe-router-num-groups`", "give both"
        )
        return
    yield from must_divide("--num-experts", moe.num_experts, "--moe-router-num-groups", groups)
    if not 1 <= chosen <= groups:
        yield FlagError(
            "--moe-router-group-topk",
            chosen,
            f"must be between 1 and `--moe-router-num-groups` ({groups})",
        )
    ranked = moe.moe_router_group_scores
    group_size = (moe.num_experts or 0) // groups
    reachable = chosen * group_size
    if 1 <= chosen <= groups and moe.moe_router_topk > reachable:
        yield FlagError(
            "--moe-router-topk",
            moe.moe_router_topk,
            f"must be at most the experts of `--moe-router-group-topk` groups ({chosen} × "
            f"{group_size} = {reachable})",
            f"use {reachable} or less",
        )
    if ranked is not None and ranked > group_size:
        yield FlagError(
            "--moe-router-group-scores",
            ranked,
            f"must be at most the experts of a group ({group_size})",
            f"use {group_size} or less",
        )


def _fused_router_errors(moe: MoEConfig) -> Iterator[FlagError]:
    """Yield an error for each way of choosing experts that the fused router does not have."""
    if not moe.moe_router_fusion:
        return
    if moe.moe_router_group_topk is not None and moe.moe_router_group_scores is not None:
        yield FlagError(
            "--moe-router-fusion",
            None,
            "ranks groups as Megatron-LM does",
            "leave it out with `--moe-router-group-scores`",
        )
    softmax = moe.moe_router_score_function == "softmax"
    own = {
        "--moe-router-norm-topk-prob": moe.moe_router_norm_topk_prob,
        "--moe-router-enable-expert-bias": moe.moe_router_enable_expert_bias,
    }
    for name, given in own.items():
        if softmax and given:
            yield FlagError(
                "--moe-router-fusion",
                None,
                f"has no `{name}` after a softmax",
                "leave one of them out",
            )


def _dispatch_errors(
    moe: MoEConfig, parallel: ParallelConfig, training: TrainingConfig, model: ModelConfig
) -> Iterator[FlagError]:
    """Yield an error for each wrong flag of token dispatch, expert capacity or recomputation."""
    tp = parallel.tensor_model_parallel_size
    if tp > 1 and not parallel.sequence_parallel and not training.skip_train:
        yield FlagError(
            "Training `--num-experts` with `--tensor-model-parallel-size`",
            tp,
            "needs `--sequence-parallel`",
            "give it",
        )
    dispatcher = moe.moe_token_dispatcher_type
    exchanging = {
        "--overlap-moe-expert-parallel-comm": parallel.overlap_moe_expert_parallel_comm,
        "--moe-keep-dispatched-tokens": moe.moe_keep_dispatched_tokens,
        "--moe-shared-expert-overlap": moe.moe_shared_expert_overlap,
    }
    for name, given in exchanging.items():
        if given and dispatcher == "allgather":
            yield FlagError(
                name,
                None,
                f"does not go with `--moe-token-dispatcher-type` ({dispatcher})",
                "use alltoall or flex",
            )
    if moe.moe_shared_expert_overlap:
        from megatron_ext.text.config.flex import overlap_errors

        yield from overlap_errors(parallel, model)
    capacity = moe.moe_expert_capacity_factor
    wrong = [x for x in moe.moe_router_load_balancing_type if x not in CAPACITY_BALANCING]
    if capacity is not None and wrong:
        yield FlagError(
            "--moe-expert-capacity-factor",
            f"{capacity:g}",
            f"does not go with `--moe-router-load-balancing-type {wrong[0]}`",
            "use aux_loss",
        )
    if capacity is None and moe.moe_pad_expert_input_to_capacity:
        yield FlagError(
            "--moe-pad-expert-input-to-capacity",
            None,
            "needs `--moe-expert-capacity-factor`",
            "give both",
        )
    if moe.moe_token_dispatcher_type == "flex" and moe.moe_ranks_per_node is not None:
        from megatron_ext.text.config.flex import node_errors

        yield from node_errors(moe.moe_ranks_per_node, parallel)
    if moe.moe_layer_recompute and model.recompute_granularity == "full":
        yield FlagError(
            "--moe-layer-recompute",
            None,
            "has no effect beside `--recompute-granularity full`",
            "leave one out",
        )
    if moe.moe_apply_probs_on_input and moe.moe_router_topk != 1:
        yield FlagError(
            "--moe-apply-probs-on-input",
            None,
            f"needs `--moe-router-topk` ({moe.moe_router_topk}) to be 1",
            "leave it out",
        )
