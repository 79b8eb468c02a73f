"""Rules for a model's layers: sizes, equal division among ranks, activations, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron_ext.config.flags import must_divide
from megatron_ext.config.model import ACTIVATIONS, RECOMPUTED_WITH_TE, ModelConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError, exclusive

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
RECOMPUTED = ("core_attn", "mlp", "moe", "shared_experts")
RECOMPUTED_LATENT = "mla_up_proj"
TENSOR = "--tensor-model-parallel-size"


def model_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of the model."""
    model = run.model
    if model.blocks_dealt_by_cost:
        yield from _recompute_errors(model, run.parallel)
        return
    missing = [name for name in REQUIRED if getattr(model, name) is None]
    for name in missing:
        yield FlagError(
            f"--{name.replace('_', '-')}", None, "is missing", "give the size of the model"
        )
    yield from _recompute_errors(model, run.parallel)
    yield from _activation_errors(model)
    if model.num_layers and model.hidden_size and model.num_attention_heads:
        yield from _width_errors(model, run.parallel)
        yield from _uneven_errors(model, run.parallel)
    if missing:
        return
    h = model.hidden_size or 1
    n = model.num_attention_heads or 1
    if h % n and model.kv_channels == h // n and run.attention_sides() is None:
        yield FlagError(
            "--hidden-size",
            h,
            f"must be divisible by `--num-attention-heads` ({n})",
            f"use {-(-h // n) * n}, or give `--kv-channels`",
        )
    yield from _layer_errors(model, n)
    yield from _gate_errors(model)


def _layer_errors(model: ModelConfig, heads: int) -> Iterator[FlagError]:
    if model.num_query_groups and heads % model.num_query_groups:
        yield FlagError(
            "--num-attention-heads",
            heads,
            f"must be divisible by `--num-query-groups` ({model.num_query_groups})",
            f"use {heads // max(1, heads // model.num_query_groups)} groups",
        )


def _width_errors(model: ModelConfig, parallel: ParallelConfig) -> Iterator[FlagError]:
    """Yield an error for each matrix or number of heads that ranks cannot share equally."""
    tp = max(1, parallel.tensor_model_parallel_size)
    cp = parallel.context_parallel_size
    yield from must_divide("--ffn-hidden-size", model.ffn_hidden_size, TENSOR, tp)
    yield from must_divide("--padded-vocab-size", model.padded_vocab_size, TENSOR, tp)
    if cp <= 1 or model.transformer_impl == "transformer_engine":
        return
    heads = (model.num_attention_heads or 0) // tp
    if "a2a" in parallel.cp_comm_type and heads % cp:
        yield FlagError(
            "--cp-comm-type a2a",
            None,
            f"needs the attention heads of a tensor-parallel rank ({heads}) to be divisible by "
            f"`--context-parallel-size` ({cp})",
            "use all_gather",
        )
    if "a2a+p2p" in parallel.cp_comm_type:
        yield FlagError(
            "--cp-comm-type",
            "a2a+p2p",
            "needs Transformer Engine's layers",
            "use p2p, all_gather or a2a",
        )


def _uneven_errors(model: ModelConfig, parallel: ParallelConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags that set the first or last stage's layer count."""
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
        yield FlagError(
            named, None, "needs `--pipeline-model-parallel-size` of at least 2", "leave it out"
        )
        return
    if parallel.counted_ends:
        yield FlagError(
            named,
            None,
            "does not go with `--account-for-embedding-in-pipeline-split` nor "
            "`--account-for-loss-in-pipeline-split`",
            "give one of them",
        )
    between = stages - len(given)
    rest = layers - sum(given.values())
    fits = rest % between == 0 and rest > 0 if between else rest == 0
    if min(given.values()) < 1 or not fits:
        yield FlagError(
            named,
            None,
            f"leaves {rest} of {layers} layers for {between} stages, which must share them "
            "equally, at least 1 each",
            "choose others",
        )
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    per_stage = [*given.values(), *([rest // between] if between else [])]
    if fits and any(count % chunks for count in per_stage):
        yield FlagError(
            named,
            None,
            f"gives stages of {', '.join(map(str, per_stage))} layers, which must be divisible by "
            f"the virtual chunks of a stage ({chunks})",
            "choose others",
        )


def _activation_errors(model: ModelConfig) -> Iterator[FlagError]:
    activations = [x for x in ACTIVATIONS if getattr(model, x)]
    if len(activations) > 1:
        yield exclusive(*(f"--{x.replace('_', '-')}" for x in activations))
    if model.deterministic_dropout and model.transformer_impl == "transformer_engine":
        yield FlagError(
            "--deterministic-dropout",
            None,
            "needs our own layers, which `--transformer-impl transformer_engine` replaces",
            "use `--transformer-impl torch`",
        )


def _recompute_errors(model: ModelConfig, parallel: ParallelConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of recomputation."""
    if model.recompute_granularity == "full" and model.recompute_method is None:
        yield FlagError(
            "--recompute-granularity full",
            None,
            "needs `--recompute-method`",
            "use uniform with `--recompute-num-layers 1`",
        )
    if model.recompute_granularity == "full" and model.recompute_num_layers is None:
        yield FlagError(
            "--recompute-granularity full", None, "needs `--recompute-num-layers`", "use 1"
        )
    if model.recompute_granularity == "selective" and model.recompute_method is not None:
        yield FlagError(
            "--recompute-method",
            model.recompute_method,
            "goes with `--recompute-granularity full`",
            "leave it out",
        )
    yield from _partial_errors(model, parallel)
    if model.blocks_dealt_by_cost:
        return
    count = model.recompute_num_layers
    selective = model.recompute_granularity == "selective"
    if selective and count is not None:
        yield FlagError(
            "--recompute-num-layers",
            count,
            "goes with `--recompute-granularity full`",
            "leave it out",
        )
    if model.recompute_granularity is None and model.recompute_method is not None:
        yield FlagError(
            "--recompute-method",
            model.recompute_method,
            "needs `--recompute-granularity full`",
            "give both",
        )
    if model.distribute_saved_activations and parallel.sequence_parallel:
        yield FlagError(
            "--distribute-saved-activations",
            None,
            "does not go with `--sequence-parallel`, which cuts them already",
            "leave it out",
        )
    given = model.recompute_modules or []
    modules = given if selective else []
    names = (*RECOMPUTED, RECOMPUTED_LATENT, *RECOMPUTED_WITH_TE)
    unknown = [name for name in given if name not in names]
    if unknown:
        yield FlagError(
            "--recompute-modules", " ".join(unknown), f"must be names among {', '.join(names)}"
        )
    with_te = [name for name in modules if name in RECOMPUTED_WITH_TE]
    if with_te and model.transformer_impl != "transformer_engine":
        yield FlagError(
            "--recompute-modules",
            with_te[0],
            "needs Transformer Engine's layers",
            f"use {', '.join(RECOMPUTED)}",
        )


def _partial_errors(model: ModelConfig, parallel: ParallelConfig) -> Iterator[FlagError]:
    """Yield an error for each option that does not go with partly recomputed micro-batches."""
    count = model.num_microbatches_with_partial_activation_checkpoints
    if count is None:
        return
    refused = partial(
        FlagError, "--num-microbatches-with-partial-activation-checkpoints", str(count)
    )
    if model.blocks_dealt_by_cost:
        yield refused("counts the layers of a GPT", "leave it out")
    elif model.recompute_granularity != "full" or model.recompute_method != "block":
        yield refused(
            "needs `--recompute-granularity full --recompute-method block`, whose "
            "`--recompute-num-layers` are those of these micro-batches",
            "give both",
        )
    schedule = parallel.pipeline_schedule or ""
    if schedule.startswith("core-"):
        yield refused(
            f"does not go with `--pipeline-schedule` ({schedule}), whose forward step would have "
            "to take another argument",
            f"use {schedule.removeprefix('core-')}",
        )


def _gate_errors(model: ModelConfig) -> Iterator[FlagError]:
    """Yield an error for each setting of a gated activation that the layers do not support."""
    for name in ("activation_func_clamp_value", "glu_linear_offset"):
        number = getattr(model, name)
        if not number:
            continue
        flag = f"--{name.replace('_', '-')}"
        if not model.gated:
            yield FlagError(
                flag,
                f"{number:g}",
                "needs a gated MLP",
                "give `--quick-geglu`, `--swiglu` or `--geglu`",
            )
        elif model.transformer_impl == TE_IMPL and not model.quick_geglu:
            yield FlagError(
                flag,
                f"{number:g}",
                "needs `--quick-geglu` with Transformer Engine's layers",
                "give it, or use `--transformer-impl torch`",
            )


def parts_of_torch_layers(model: ModelConfig) -> list[str]:
    """Return the flags set in ``model`` that only the torch layers support."""
    some = not model.add_bias_linear
    given = {
        "--sandwich-norm": model.sandwich_norm,
        "--add-proj-bias": model.add_proj_bias and some,
        "--add-mlp-bias": model.add_mlp_bias and some,
    }
    return [flag for flag, has in given.items() if has]
