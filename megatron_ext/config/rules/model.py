"""Rules of the model's flags: sizes, rotary positions, windows, parts that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config.layers import pattern_errors
from megatron_ext.config.model import ACTIVATIONS, ModelConfig
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.run import RunConfig

REQUIRED = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length",
)  # fmt: skip


def model_errors(run: RunConfig) -> Iterator[str]:
    """Yield a sentence for each fault in the flags of the model."""
    model = run.model
    if model.blocks_dealt_by_cost:
        yield from _recompute_errors(model)
        return
    missing = [name for name in REQUIRED if getattr(model, name) is None]
    for name in missing:
        yield f"`--{name.replace('_', '-')}` is missing; give the size of the model."
    yield from _recompute_errors(model)
    yield from _activation_errors(model)
    if missing:
        return
    h = model.hidden_size or 1
    n = model.num_attention_heads or 1
    if h % n and model.kv_channels == h // n and run.attention_sides() is None:
        yield (
            f"`--hidden-size` ({h}) must be divisible by `--num-attention-heads` ({n}); use "
            f"{-(-h // n) * n}, or give `--kv-channels`."
        )
    yield from _pattern_errors(model)
    yield from _layer_errors(model, n)
    yield from _score_errors(model)


def _layer_errors(model: ModelConfig, heads: int) -> Iterator[str]:
    if model.num_query_groups and heads % model.num_query_groups:
        yield (
            f"`--num-attention-heads` ({heads}) must be divisible by `--num-query-groups` "
            f"({model.num_query_groups}); use {heads // max(1, heads // model.num_query_groups)}"
            " groups."
        )


def _activation_errors(model: ModelConfig) -> Iterator[str]:
    activations = [x for x in ACTIVATIONS if getattr(model, x)]
    if len(activations) > 1:
        flags = " and ".join(f"`--{x.replace('_', '-')}`" for x in activations)
        yield f"{flags} exclude each other; give one."
    if model.deterministic_dropout and model.transformer_impl == "transformer_engine":
        yield (
            "`--deterministic-dropout` needs our own layers, which `--transformer-impl "
            "transformer_engine` replaces; use `--transformer-impl torch`."
        )


def _recompute_errors(model: ModelConfig) -> Iterator[str]:
    if model.recompute_granularity == "full" and model.recompute_method is None:
        yield (
            "`--recompute-granularity full` needs `--recompute-method`; use uniform with "
            "`--recompute-num-layers 1`."
        )
    if model.recompute_granularity == "full" and model.recompute_num_layers is None:
        yield "`--recompute-granularity full` needs `--recompute-num-layers`; use 1."
    if model.recompute_granularity == "selective" and model.recompute_method is not None:
        yield (
            f"`--recompute-method` ({model.recompute_method}) goes with "
            "`--recompute-granularity full`; leave it out."
        )


def _pattern_errors(model: ModelConfig) -> Iterator[str]:
    """Yield a sentence if a list of layers does not fit the number of layers."""
    layers = model.num_layers or 0
    yield from pattern_errors("--window-attn-skip-freq", model.window_attn_skip_freq, layers)


def _score_errors(model: ModelConfig) -> Iterator[str]:
    """Yield a sentence for scores of attention or gates that a chosen kernel does not compute."""
    own = {
        "--softmax-type": model.softmax_type if model.softmax_type != "vanilla" else None,
        "--attn-logit-softcapping": model.attn_logit_softcapping,
    }
    backend = model.attention_backend
    for flag, value in own.items():
        if value and model.transformer_impl != TE_IMPL and backend not in ("auto", "local"):
            yield (
                f"`--attention-backend` ({backend}) has no kernel for `{flag}` ({value}); use auto "
                "or local."
            )
    for name in ("activation_func_clamp_value", "glu_linear_offset"):
        number = getattr(model, name)
        if not number:
            continue
        named = f"`--{name.replace('_', '-')}` ({number:g})"
        if not model.gated:
            yield f"{named} needs a gated MLP; give `--quick-geglu`, `--swiglu` or `--geglu`."
        elif model.transformer_impl == TE_IMPL and not model.quick_geglu:
            yield (
                f"{named} needs `--quick-geglu` with Transformer Engine's layers; give it, or use "
                "`--transformer-impl torch`."
            )


def parts_of_torch_layers(model: ModelConfig) -> list[str]:
    """Return the flags given that only the torch layers follow, not Transformer Engine's."""
    some = not model.add_bias_linear
    given = {
        "--attn-logit-softcapping": model.attn_logit_softcapping is not None,
        "--sandwich-norm": model.sandwich_norm,
        "--add-proj-bias": model.add_proj_bias and some,
        "--add-mlp-bias": model.add_mlp_bias and some,
    }
    return [flag for flag, has in given.items() if has]
