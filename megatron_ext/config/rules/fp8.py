"""Which flags of fp8 go together, and with which layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.config.flags import changed_fields, spelling_of
from megatron_ext.config.precision import TE_RECIPES, TORCH_RECIPES, Fp8Config

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

OF_DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "tp_only_amax_red")
OF_TE = (
    "fp8_param_gather",
    "fp8_quantizer_factory",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "tp_only_amax_red",
    "moe_router_padding_for_quantization",
)
OF_BF16_LAYERS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
UNIT = 16
"""The numbers that the sides of a weight on one rank must divide by, for 8-bit products."""

UNIT_OF_MXFP8 = 32
TOKENS = 8
"""The numbers that a rank's tokens must divide by in Transformer Engine's 8-bit products."""


def fp8_errors(run: RunConfig, *, may_use_te: bool) -> list[str]:
    """Return a sentence for everything that cannot be run in 8 bits.

    Args:
        run: the resolved configuration.
        may_use_te: Transformer Engine's layers would not be refused for other flags.
    """
    fp8 = run.fp8
    if fp8.fp8_format is None:
        return [
            f"`{spelling_of(fp8, name)}` needs `--fp8-format`; give e4m3 or hybrid."
            for name in changed_fields(fp8)
        ]
    te = run.model.transformer_impl == "transformer_engine"
    found = _recipe_errors(fp8, te=te, may_use_te=may_use_te)
    found += [*_layer_errors(fp8, run, te=te), *_run_errors(run)]
    found += _of_transformer_engine(fp8, run) if te else _of_torch(fp8, may_use_te=may_use_te)
    return [*found, *_width_errors(fp8, run)]


def unit_of(recipe: str) -> int:
    """Return the number that the sides of a weight on one rank must divide by."""
    return UNIT_OF_MXFP8 if recipe == "mxfp8" else UNIT


def _recipe_errors(fp8: Fp8Config, *, te: bool, may_use_te: bool) -> list[str]:
    found = []
    if fp8.fp8_recipe in TE_RECIPES and not te:
        instead = ", or `--transformer-impl transformer_engine`" if may_use_te else ""
        found.append(
            f"`--fp8-recipe` ({fp8.fp8_recipe}) is a recipe of Transformer Engine's layers; use "
            f"delayed, tensorwise or rowwise{instead}."
        )
    if fp8.fp8_recipe in TORCH_RECIPES and te:
        found.append(
            f"`--fp8-recipe` ({fp8.fp8_recipe}) is a recipe of the torch layers; use "
            "`--transformer-impl torch`, or delayed, tensorwise, blockwise or mxfp8."
        )
    if fp8.fp8_recipe != "delayed":
        found += [
            f"`{spelling_of(fp8, name)}` belongs to `--fp8-recipe delayed`, but the recipe is "
            f"{fp8.fp8_recipe}; leave it out."
            for name in changed_fields(fp8)
            if name in OF_DELAYED
        ]
    return found


def _layer_errors(fp8: Fp8Config, run: RunConfig, *, te: bool) -> list[str]:
    """Return a sentence for each fault of the layers that are to stay in bf16."""
    if not fp8.first_last_layers_bf16:
        return [
            f"`{spelling_of(fp8, name)}` needs `--first-last-layers-bf16`; give it too."
            for name in changed_fields(fp8)
            if name in OF_BF16_LAYERS
        ]
    num_layers = run.model.num_layers or 0
    found = list[str]()
    if fp8.fp8_recipe == "delayed":
        found.append(
            "`--first-last-layers-bf16` does not go with `--fp8-recipe delayed`, whose state is "
            "that of all layers alike; use tensorwise."
        )
    kept = fp8.num_layers_at_start_in_bf16 + fp8.num_layers_at_end_in_bf16
    if not found and kept >= num_layers > 0:
        found.append(
            f"`--first-last-layers-bf16` keeps {kept} of the {num_layers} layers in bf16, so that "
            "none is left for `--fp8-format`; leave that out."
        )
    per_stage = num_layers // max(1, run.parallel.pipeline_model_parallel_size)
    found += [
        f"`{spelling_of(fp8, name)}` ({getattr(fp8, name)}) must be at most the layers of a "
        f"pipeline stage ({per_stage}) with Transformer Engine's layers."
        for name in OF_BF16_LAYERS
        if te and not found and getattr(fp8, name) > per_stage > 0
    ]
    return found


def _run_errors(run: RunConfig) -> list[str]:
    rules = (
        (not run.precision.bf16, "needs `--bf16` for all but its products; give it too"),
        (
            run.model.blocks_dealt_by_cost and run.fp8.first_last_layers_bf16,
            "does not go with `--first-last-layers-bf16` in a model of several kinds of blocks; "
            "leave that out",
        ),
    )
    return [f"`--fp8-format` {reason}." for broken, reason in rules if broken]


def _of_torch(fp8: Fp8Config, *, may_use_te: bool) -> list[str]:
    instead = "use `--transformer-impl transformer_engine`, or " if may_use_te else ""
    return [
        f"`{spelling_of(fp8, name)}` is an option of Transformer Engine's layers; "
        f"{instead}leave it out."
        for name in changed_fields(fp8)
        if name in OF_TE
    ]


def _of_transformer_engine(fp8: Fp8Config, run: RunConfig) -> list[str]:
    """Refuse options that only Transformer Engine's layers have, and those that they lack."""
    found = []
    if not fp8.fp8_wgrad:
        found.append(
            "`--no-fp8-wgrad` is ignored by Transformer Engine since its version 2; use "
            "`--transformer-impl torch`, or leave it out."
        )
    custom = fp8.fp8_recipe == "custom"
    if custom and fp8.fp8_quantizer_factory is None:
        found.append(
            "`--fp8-recipe custom` needs `--fp8-quantizer-factory`; give package.module.function."
        )
    if not custom and fp8.fp8_quantizer_factory is not None:
        found.append(
            f"`--fp8-quantizer-factory` ({fp8.fp8_quantizer_factory}) belongs to `--fp8-recipe "
            f"custom`, but the recipe is {fp8.fp8_recipe}; leave it out."
        )
    recomputed = [
        name for name in run.model.recompute_modules or () if name in ("layernorm", "moe_act")
    ]
    selective = run.model.recompute_granularity == "selective"
    if selective and recomputed and fp8.fp8_recipe == "delayed":
        found.append(
            f"`--recompute-modules` ({recomputed[0]}) does not go with `--fp8-recipe delayed`; use "
            "tensorwise."
        )
    return [*found, *_param_gather_errors(fp8, run), *_padding_errors(fp8, run)]


def _param_gather_errors(fp8: Fp8Config, run: RunConfig) -> list[str]:
    mxfp8, reuses = fp8.fp8_recipe == "mxfp8", fp8.reuse_grad_buf_for_mxfp8_param_ag
    if not fp8.fp8_param_gather:
        return (
            ["`--reuse-grad-buf-for-mxfp8-param-ag` needs `--fp8-param-gather`; give both."]
            if reuses
            else []
        )
    rules = (
        (
            not run.optimizer.use_distributed_optimizer,
            "needs `--use-distributed-optimizer`, which holds the weights in fp32; give both",
        ),
        (
            fp8.fp8_recipe == "custom",
            "does not go with `--fp8-recipe custom`, whose weights megatron-core cannot gather; "
            "leave it out",
        ),
        (
            mxfp8 and not reuses,
            "with `--fp8-recipe mxfp8` needs `--reuse-grad-buf-for-mxfp8-param-ag`; give both",
        ),
        (
            reuses and not mxfp8,
            f"with `--reuse-grad-buf-for-mxfp8-param-ag` needs `--fp8-recipe mxfp8`, but it is "
            f"{fp8.fp8_recipe}; leave the latter out",
        ),
        (
            reuses and run.optimizer.overlap_param_gather,
            "with `--reuse-grad-buf-for-mxfp8-param-ag` does not go with "
            "`--overlap-param-gather`, which would write weights over gradients; leave it out",
        ),
        (
            run.ema.keeps_average(trains=not run.training.skip_train),
            "does not go with `--ema-decay`, whose average cannot take the place of 8-bit "
            "weights; leave one out",
        ),
        (
            run.model.use_cpu_initialization,
            "does not go with `--use-cpu-initialization`, which leaves the fp32 weights without "
            "their first values; leave the latter out",
        ),
    )
    return [f"`--fp8-param-gather` {reason}." for broken, reason in rules if broken]


def _padding_errors(fp8: Fp8Config, run: RunConfig) -> list[str]:
    if not fp8.moe_router_padding_for_quantization:
        return []
    if run.moe.num_experts is None:
        return ["`--moe-router-padding-for-quantization` needs `--num-experts`; give both."]
    dispatcher = run.moe.moe_token_dispatcher_type
    if dispatcher == "allgather":
        return [
            "`--moe-router-padding-for-quantization` does not go with "
            f"`--moe-token-dispatcher-type` ({dispatcher}); use alltoall."
        ]
    return []


def _width_errors(fp8: Fp8Config, run: RunConfig) -> list[str]:
    """Refuse sides of weights, and tokens, on one rank that 8-bit products cannot have."""
    model, parallel = run.model, run.parallel
    tp, unit = parallel.tensor_model_parallel_size, unit_of(fp8.fp8_recipe)
    heads = model.num_attention_heads or 0
    channels = model.kv_channels or 0
    queries, groups = heads * channels, (model.num_query_groups or heads) * channels
    sides = [
        ("--hidden-size", model.hidden_size or 0, 1),
        ("--num-attention-heads times --kv-channels", queries, tp),
        ("the width of queries, keys and values", queries + 2 * groups, tp),
        ("--ffn-hidden-size", model.ffn_hidden_size or 0, tp),
    ]
    if run.moe.num_experts is not None:
        moe, parts = run.moe, parallel.expert_tensor_parallel_size or tp
        shared = moe.moe_shared_expert_intermediate_size or 0
        sides.append(("--moe-ffn-hidden-size", moe.moe_ffn_hidden_size or 0, parts))
        sides.append(("--moe-shared-expert-intermediate-size", shared, tp))
    found = [
        f"`--fp8-format` needs layers whose sides divide by {unit} on every rank, but {name} "
        f"({width}) over {parts} rank(s) does not; use a multiple of {unit * parts}."
        for name, width, parts in sides
        if width % (unit * parts)
    ]
    if model.transformer_impl == "transformer_engine":
        found += _token_errors(fp8, run)
    return found


def _token_errors(fp8: Fp8Config, run: RunConfig) -> list[str]:
    unit = UNIT_OF_MXFP8 if fp8.fp8_recipe == "mxfp8" else TOKENS
    parallel = run.parallel
    parts = max(1, parallel.context_parallel_size)
    if parallel.sequence_parallel:
        parts *= parallel.tensor_model_parallel_size
    tokens = (run.model.seq_length or 0) * (run.training.micro_batch_size or 1)
    if tokens % (parts * unit) == 0:
        return []
    return [
        f"`--fp8-format` needs micro-batches whose tokens divide by {unit} on every rank, but "
        f"`--seq-length` times `--micro-batch-size` ({tokens}) over {parts} rank(s) does not; use "
        f"a multiple of {unit * parts}."
    ]
