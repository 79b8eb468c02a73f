"""Rules of the model's flags: sizes, rotary positions, windows, parts that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config.flags import changed_fields
from megatron_ext.config.layers import pattern_error
from megatron_ext.config.model import ACTIVATIONS, ModelConfig
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.rotary import RopeScaling, read_scaling

REQUIRED = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings",
)  # fmt: skip


def model_errors(model: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each fault in the flags of the model."""
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
    latent = model.multi_latent_attention
    if h % n and model.kv_channels == h // n and not latent:
        yield (
            f"`--hidden-size` ({h}) must be divisible by `--num-attention-heads` ({n}); use "
            f"{-(-h // n) * n}, or give `--kv-channels`."
        )
    if (model.max_position_embeddings or 0) < (model.seq_length or 0):
        yield (
            f"`--max-position-embeddings` ({model.max_position_embeddings}) must be at least "
            f"`--seq-length` ({model.seq_length}); use {model.seq_length}."
        )
    if model.position_embedding_type == "rope" and model.kv_channels and not latent:
        yield from _rotary_errors(model, model.kv_channels)
    yield from _yarn_errors(model)
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
    """Yield a sentence for each list of layers that does not fit the number of layers."""
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        text = getattr(model, name)
        flag = f"--{name.replace('_', '-')}"
        error = None if text is None else pattern_error(flag, str(text), model.num_layers or 0)
        if error is not None:
            yield error


def _rotary_errors(model: ModelConfig, size: int) -> Iterator[str]:
    """Yield a sentence for each fault of rotary positions in heads of ``size`` channels."""
    if model.rotary_percent == 1 and size % 2:
        yield (
            f"`--kv-channels` ({size}) must be even with `--position-embedding-type rope`, "
            f"which rotates channels in pairs; use {size + 1}."
        )
    elif int(size * model.rotary_percent) < 1:
        yield (
            f"`--rotary-percent` ({model.rotary_percent}) leaves no channel of a head of "
            f"{size} to rotate; use {2 / size:g} or more."
        )
    if model.rope_local_base_freq is not None and model.window_size is None:
        yield (
            f"`--rope-local-base-freq` ({model.rope_local_base_freq:g}) is the base of layers with "
            "a window, which `--window-size` gives; give both."
        )
    others = ("use_rope_scaling", "rotary_seq_len_interpolation_factor")
    given = [f"`--{x.replace('_', '-')}`" for x in others if getattr(model, x)]
    if model.rope_scaling is None:
        return
    if given:
        yield f"`--rope-scaling` and {given[0]} exclude each other; give one."
    try:
        scaling = scaling_of(model)
    except ValueError as error:
        yield f"`--rope-scaling` ({model.rope_scaling}) {error}."
        return
    pairs = -(-int(size * model.rotary_percent) // 2)
    for name in ("short_factor", "long_factor"):
        count = len(getattr(scaling, name, ()))
        if count not in (0, pairs):
            yield (
                f"`--rope-scaling` has {count} numbers in {name}, but must have one for each of "
                f"the {pairs} pairs of channels that are rotated; mend it."
            )


def scaling_of(model: ModelConfig) -> RopeScaling | None:
    """Return the scaling of ``--rope-scaling``; raise a ValueError with the rule that it breaks."""
    return read_scaling(model.rope_scaling, model.max_position_embeddings or 0)


def _yarn_errors(model: ModelConfig) -> Iterator[str]:
    """Yield a sentence for flags of YaRN that `ModelConfig.resolved` could not settle."""
    given = [name for name in changed_fields(model) if name.startswith("yarn_")]
    if model.position_embedding_type != "yarn":
        if given:
            yield (
                f"`--{given[0].replace('_', '-')}` needs `--position-embedding-type yarn`; give "
                "both."
            )
    elif model.rope_scaling is not None:
        yield "`--position-embedding-type yarn` and `--rope-scaling` exclude each other; give one."
    else:
        for name in ("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings"):
            if getattr(model, name) is None:
                flag = f"--{name.replace('_', '-')}"
                yield f"`--position-embedding-type yarn` needs `{flag}`; give it."


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
    magnitude = 1.0
    try:
        scaling = scaling_of(model.without_yarn())
        magnitude = 1.0 if scaling is None else scaling.magnitude
    except ValueError:
        pass  # said by the rules of rotary positions
    some = not model.add_bias_linear
    given = {
        "--attn-logit-softcapping": model.attn_logit_softcapping is not None,
        "--sandwich-norm": model.sandwich_norm,
        "--add-proj-bias": model.add_proj_bias and some,
        "--add-mlp-bias": model.add_mlp_bias and some,
        "--rope-local-base-freq": model.rope_local_base_freq is not None,
        "--rope-scaling": magnitude != 1,
    }
    return [flag for flag, has in given.items() if has]
