"""Llama, and what other families share with it: its names, and its rotary positions."""

from collections.abc import Mapping
from typing import Any

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.moe import MoEConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.family import Family, Fields, Settings
from megatron_ext.text.convert.table import Part, Parts, Table, grouped_qkv, joined, whole

INPUT_NORM = "self_attention.linear_qkv.layer_norm_weight"
DENSE_NORM, EXPERT_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
"""Our names of a layer's norms; the second norm's depends on whether experts follow it."""
LAYER = "model.layers.{layer}"
SAME = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
FIXED = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}
ONLY = {"hidden_act": "silu"}
LLAMA3_CONSTANTS = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
"""The fixed constants of megatron-core's ``--use-rope-scaling``; only its factor is a flag."""


def read(settings: Settings) -> Fields:
    """Return the fields of heads, positions, dropout and tied embeddings."""
    heads = int(settings["num_attention_heads"])
    groups = int(settings["num_key_value_heads"] or heads)
    return {
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "kv_channels": int(settings["head_dim"] or settings["hidden_size"] // heads),
        **read_rotary(settings),
        "untie_embeddings_and_output_weights": not settings["tie_word_embeddings"],
        "attention_dropout": float(settings["attention_dropout"] or 0.0),
    }


def write(model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """Return the entries of config.json that `read` reads."""
    return {
        "num_key_value_heads": model.num_query_groups or model.num_attention_heads,
        "head_dim": model.kv_channels,
        **write_rotary(model),
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def read_rotary(settings: Settings) -> Fields:
    """Return the fields of rotary positions; raise a CheckpointError for an unknown kind."""
    # transformers 4 keeps the base beside the scaling, and transformers 5 keeps it within.
    scaling = dict(settings["rope_parameters"] or settings["rope_scaling"] or {})
    base = scaling.get("rope_theta", settings["rope_theta"])
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    partial = scaling.get("partial_rotary_factor", settings["partial_rotary_factor"]) or 1.0
    if base is None or int(base) != base:
        raise CheckpointError(
            f"{settings.path} says `rope_theta` {base!r}, but `--rotary-base` must be an integer; "
            "use another model."
        )
    fields: Fields = {"rotary_base": int(base), "rotary_percent": float(partial)}
    if kind == "default":
        return fields
    factor = float(scaling.get("factor") or 1.0)
    same = all(scaling.get(name) == value for name, value in LLAMA3_CONSTANTS.items())
    if kind == "llama3" and same:
        return {**fields, "use_rope_scaling": True, "rope_scaling_factor": factor}
    if kind == "linear" and factor.is_integer():
        return {**fields, "rotary_seq_len_interpolation_factor": int(factor)}
    known = ", ".join(f"{name} {value}" for name, value in LLAMA3_CONSTANTS.items())
    shown = {name: value for name, value in scaling.items() if name != "rope_theta"}
    raise CheckpointError(
        f"{settings.path} says `rope_scaling` {shown}, which our flags cannot describe; linear "
        f"with an integer factor, and llama3 with {known}, can be converted."
    )


def write_rotary(model: ModelConfig) -> dict[str, Any]:
    """Return the entries of config.json that `read_rotary` reads."""
    found: dict[str, Any] = {"rope_theta": float(model.rotary_base), "rope_scaling": None}
    if model.rotary_percent != 1:
        found["partial_rotary_factor"] = model.rotary_percent
    if model.use_rope_scaling:
        factor = model.rope_scaling_factor
        found["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **LLAMA3_CONSTANTS}
    elif model.rotary_seq_len_interpolation_factor:
        factor = float(model.rotary_seq_len_interpolation_factor)
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return found


def read_window(settings: Settings, key: str = "sliding_window") -> Fields:
    """Return the field of a sliding window in all layers.

    transformers' window counts the tokens that a query sees, with its own; ours counts those to the
    left of it.
    """
    window = settings[key]
    if not window or window >= settings["max_position_embeddings"]:
        return {}
    return {"window_size": (int(window) - 1, 0)}


def write_window(model: ModelConfig) -> dict[str, Any]:
    """Return the entry of config.json that `read_window` reads."""
    return {"sliding_window": None if model.window_size is None else model.window_size[0] + 1}


def outer(vocab_size: int, *, prefix: str = "model.") -> dict[str, Parts]:
    """Return the parts of the embedding, the final norm and the output layer."""
    embedding, head = Part(f"{prefix}embed_tokens.weight", vocab_size), "lm_head.weight"
    return {
        "embedding.word_embeddings.weight": (embedding,),
        "decoder.final_layernorm.weight": whole(f"{prefix}norm.weight"),
        "output_layer.weight": (Part(head, vocab_size),),
    }


def norms() -> dict[str, Parts]:
    """Return the parts of the two norms of a layer."""
    second = whole(f"{LAYER}.post_attention_layernorm.weight")
    return {
        INPUT_NORM: whole(f"{LAYER}.input_layernorm.weight"),
        DENSE_NORM: second,
        EXPERT_NORM: second,
    }


def attention(model: ModelConfig) -> dict[str, Parts]:
    """Return the parts of an attention with separate projections, biases and norms included."""
    theirs = f"{LAYER}.self_attn"
    found = {"self_attention.linear_proj.weight": whole(f"{theirs}.o_proj.weight")}
    for kind in ("weight", "bias"):
        names = [f"{theirs}.{part}_proj.{kind}" for part in "qkv"]
        found[f"self_attention.linear_qkv.{kind}"] = grouped_qkv(model, *names)
    for part in "qk":
        norm = whole(f"{theirs}.{part}_norm.weight")
        found[f"self_attention.{part}_layernorm.weight"] = norm
    return found


def gated_mlp(
    ours: str = "mlp",
    theirs: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Parts]:
    """Return the parts of a gated MLP, given the paths of it and its three projections' names."""
    gate, up, down = (f"{LAYER}.{theirs}.{name}.weight" for name in names)
    return {f"{ours}.linear_fc1.weight": joined(gate, up), f"{ours}.linear_fc2.weight": whole(down)}


def weights(model: ModelConfig, moe: MoEConfig, vocab_size: int) -> Table:
    """Return the table of a dense decoder with Llama's names."""
    return Table(outer(vocab_size), {**norms(), **attention(model), **gated_mlp()})


def relative(changed: Mapping[str, Any], **attributes: Any) -> Family:
    """Return a family that is Llama but for some attributes, with ``changed`` fixed fields."""
    own = {"fixed": {**FIXED, **changed}, "same": SAME, "only": ONLY, "read": read, "write": write}
    return Family(**{**own, "weights": weights, **attributes})


FAMILY = relative(
    {},
    model_type="llama",
    architecture="LlamaForCausalLM",
    only=ONLY | {"attention_bias": False, "mlp_bias": False},
)
