"""Checks the flags of 8-bit matrix products, and the sizes of the matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from megatron_ext.config.flags import changed_fields, spelling_of
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.precision import TE_RECIPES, TORCH_RECIPES, Fp8Config
from megatron_ext.config.run import RunConfig, Side
from megatron_ext.errors import FlagError

OF_DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "tp_only_amax_red")
OF_TE = (
    "fp8_param_gather fp8_quantizer_factory reuse_grad_buf_for_mxfp8_param_ag tp_only_amax_red "
    "moe_router_padding_for_quantization"
).split()
OF_BF16_LAYERS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
UNIT = 16
"""Both dimensions of a rank's weight must be multiples of this for 8-bit matrix products."""
UNIT_OF_MXFP8 = 32
TOKENS = 8
"""Transformer Engine's 8-bit products need a multiple of this number of tokens on a rank."""


def fp8_errors(run: RunConfig, *, may_use_te: bool) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of 8-bit matrix products.

    ``may_use_te`` is False if another flag excludes Transformer Engine's layers.
    """
    fp8 = run.fp8
    model = run.model
    if fp8.fp8_format is None:
        for name in changed_fields(fp8):
            yield FlagError(
                spelling_of(fp8, name), None, "needs `--fp8-format`", "give e4m3 or hybrid"
            )
        return
    te = model.transformer_impl == "transformer_engine"
    yield from _recipe_errors(fp8, te=te, may_use_te=may_use_te)
    yield from _bf16_layer_errors(fp8, model, run.parallel, te=te)
    if not run.precision.bf16:
        yield FlagError(
            "--fp8-format", None, "needs `--bf16` for all but its products", "give it too"
        )
    if model.blocks_dealt_by_cost and fp8.first_last_layers_bf16:
        yield FlagError(
            "--fp8-format",
            None,
            "does not go with `--first-last-layers-bf16` in a model of several kinds of blocks",
            "leave that out",
        )
    if te:
        yield from _te_errors(fp8, model)
        averages = run.ema.keeps_average(trains=not run.training.skip_train)
        yield from _param_gather_errors(fp8, model, run.optimizer, averages=averages)
    else:
        instead = "use `--transformer-impl transformer_engine`, or " if may_use_te else ""
        for name in (name for name in changed_fields(fp8) if name in OF_TE):
            yield FlagError(
                spelling_of(fp8, name),
                None,
                "is an option of Transformer Engine's layers",
                f"{instead}leave it out",
            )
    yield from _size_errors(run)


def _recipe_errors(fp8: Fp8Config, *, te: bool, may_use_te: bool) -> Iterator[FlagError]:
    if fp8.fp8_recipe in TE_RECIPES and not te:
        instead = ", or `--transformer-impl transformer_engine`" if may_use_te else ""
        yield FlagError(
            "--fp8-recipe",
            fp8.fp8_recipe,
            "is a recipe of Transformer Engine's layers",
            f"use delayed, tensorwise or rowwise{instead}",
        )
    if fp8.fp8_recipe in TORCH_RECIPES and te:
        yield FlagError(
            "--fp8-recipe",
            fp8.fp8_recipe,
            "is a recipe of the torch layers",
            "use `--transformer-impl torch`, or delayed, tensorwise, blockwise or mxfp8",
        )
    for name in changed_fields(fp8):
        if name in OF_DELAYED and fp8.fp8_recipe != "delayed":
            yield FlagError(
                spelling_of(fp8, name),
                None,
                f"belongs to `--fp8-recipe delayed`, but the recipe is {fp8.fp8_recipe}",
                "leave it out",
            )


def _bf16_layer_errors(
    fp8: Fp8Config, model: ModelConfig, parallel: ParallelConfig, *, te: bool
) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of layers that stay in bf16.

    ``te`` says whether the layers are Transformer Engine's. If so, at each end of the model at most
    as many layers may stay in bf16 as one pipeline stage has.
    """
    if not fp8.first_last_layers_bf16:
        for name in (name for name in changed_fields(fp8) if name in OF_BF16_LAYERS):
            yield FlagError(
                spelling_of(fp8, name), None, "needs `--first-last-layers-bf16`", "give it too"
            )
        return
    num_layers = model.num_layers or 0
    kept = fp8.num_layers_at_start_in_bf16 + fp8.num_layers_at_end_in_bf16
    per_stage = num_layers // max(1, parallel.pipeline_model_parallel_size)
    if fp8.fp8_recipe == "delayed":
        yield FlagError(
            "--first-last-layers-bf16",
            None,
            "does not go with `--fp8-recipe delayed`, whose state is that of all layers alike",
            "use tensorwise",
        )
    elif kept >= num_layers > 0:
        yield FlagError(
            "--first-last-layers-bf16",
            None,
            f"keeps {kept} of the {num_layers} layers in bf16, so that none is left for "
            "`--fp8-format`",
            "leave that out",
        )
    elif te and per_stage > 0:
        counts = {name: getattr(fp8, name) for name in OF_BF16_LAYERS}
        for name, count in counts.items():
            if count > per_stage:
                yield FlagError(
                    spelling_of(fp8, name),
                    count,
                    f"must be at most the layers of a pipeline stage ({per_stage}) with "
                    "Transformer Engine's layers",
                )


def _te_errors(fp8: Fp8Config, model: ModelConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the 8-bit options of Transformer Engine's layers."""
    factory = fp8.fp8_quantizer_factory
    custom = fp8.fp8_recipe == "custom"
    if not fp8.fp8_wgrad:
        yield FlagError(
            "--no-fp8-wgrad",
            None,
            "is ignored by Transformer Engine since its version 2",
            "use `--transformer-impl torch`, or leave it out",
        )
    if custom and factory is None:
        yield FlagError(
            "--fp8-recipe custom",
            None,
            "needs `--fp8-quantizer-factory`",
            "give package.module.function",
        )
    if not custom and factory is not None:
        yield FlagError(
            "--fp8-quantizer-factory",
            factory,
            f"belongs to `--fp8-recipe custom`, but the recipe is {fp8.fp8_recipe}",
            "leave it out",
        )
    modules = [name for name in model.recompute_modules or () if name in ("layernorm", "moe_act")]
    selective = model.recompute_granularity == "selective"
    if selective and modules and fp8.fp8_recipe == "delayed":
        yield FlagError(
            "--recompute-modules",
            modules[0],
            "does not go with `--fp8-recipe delayed`",
            "use tensorwise",
        )


def _param_gather_errors(
    fp8: Fp8Config, model: ModelConfig, optimizer: OptimizerConfig, *, averages: bool
) -> Iterator[FlagError]:
    mxfp8 = fp8.fp8_recipe == "mxfp8"
    reuses = fp8.reuse_grad_buf_for_mxfp8_param_ag
    reuse = "--reuse-grad-buf-for-mxfp8-param-ag"
    if not fp8.fp8_param_gather:
        if reuses:
            yield FlagError(reuse, None, "needs `--fp8-param-gather`", "give both")
        return
    refused = partial(FlagError, "--fp8-param-gather", None)
    if not optimizer.use_distributed_optimizer:
        yield refused(
            "needs `--use-distributed-optimizer`, which holds the weights in fp32", "give both"
        )
    if fp8.fp8_recipe == "custom":
        yield refused(
            "does not go with `--fp8-recipe custom`, whose weights megatron-core cannot gather",
            "leave it out",
        )
    if mxfp8 and not reuses:
        yield refused(f"with `--fp8-recipe mxfp8` needs `{reuse}`", "give both")
    if reuses and not mxfp8:
        yield refused(
            f"with `{reuse}` needs `--fp8-recipe mxfp8`, but it is {fp8.fp8_recipe}",
            "leave the latter out",
        )
    if reuses and optimizer.overlap_param_gather:
        yield refused(
            f"with `{reuse}` does not go with `--overlap-param-gather`, which would write weights "
            "over gradients",
            "leave it out",
        )
    if averages:
        yield refused(
            "does not go with `--ema-decay`, whose average cannot take the place of 8-bit weights",
            "leave one out",
        )
    if model.use_cpu_initialization:
        yield refused(
            "does not go with `--use-cpu-initialization`, which leaves the fp32 weights without "
            "their first values",
            "leave the latter out",
        )


def _size_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each size of a rank's matrices that 8-bit products do not support."""
    fp8 = run.fp8
    model = run.model
    parallel = run.parallel
    micro_batch = run.training.micro_batch_size or 1
    tp = parallel.tensor_model_parallel_size
    sides = [
        ("--hidden-size", model.hidden_size, 1),
        *_attention_sides(run),
        ("--ffn-hidden-size", model.ffn_hidden_size, tp),
    ]
    yield from side_errors(fp8, sides)
    if model.transformer_impl != "transformer_engine":
        return
    unit = UNIT_OF_MXFP8 if fp8.fp8_recipe == "mxfp8" else TOKENS
    parts = max(1, parallel.context_parallel_size) * (tp if parallel.sequence_parallel else 1)
    tokens = (model.seq_length or 0) * micro_batch
    if tokens % (parts * unit):
        yield FlagError(
            "--fp8-format",
            None,
            f"needs micro-batches whose tokens divide by {unit} on every rank, but `--seq-length` "
            f"times `--micro-batch-size` ({tokens}) over {parts} rank(s) does not",
            f"use a multiple of {unit * parts}",
        )


def side_errors(fp8: Fp8Config, sides: Sequence[Side]) -> Iterator[FlagError]:
    """Yield an error for each dimension of a weight matrix that 8-bit products do not support.

    Each of ``sides`` is a dimension: (name, total width, number of ranks that split the width).
    """
    unit = UNIT_OF_MXFP8 if fp8.fp8_recipe == "mxfp8" else UNIT
    for name, width, parts in sides:
        if (width or 0) % (unit * parts):
            yield FlagError(
                "--fp8-format",
                None,
                f"needs layers whose sides divide by {unit} on every rank, but {name} ({width}) "
                f"over {parts} rank(s) does not",
                f"use a multiple of {unit * parts}",
            )


def _attention_sides(run: RunConfig) -> Sequence[Side]:
    """Return the dimensions of attention's weight matrices, apart from the hidden size.

    Each is a tuple of name, total width, and number of ranks over which the width is split.
    """
    own = run.attention_sides()
    if own is not None:
        return own
    model = run.model
    tp = run.parallel.tensor_model_parallel_size
    heads = model.num_attention_heads or 0
    channels = model.kv_channels or 0
    queries = heads * channels
    groups = (model.num_query_groups or heads) * channels
    return [
        ("--num-attention-heads times --kv-channels", queries, tp),
        ("the width of queries, keys and values", queries + 2 * groups, tp),
    ]
