"""Llama; other families share its names and its rotary positions."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ext.disk.reading import parse_json
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.rope_scaling import read_scaling, written
from megatron_ext.text.convert.family import Family, Fields, Gpt, Settings
from megatron_ext.text.convert.table import Part, Parts, Table, grouped_qkv, joined, whole

INPUT_NORM = "self_attention.linear_qkv.layer_norm_weight"
DENSE_NORM, EXPERT_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
"""Our names of a layer's second norm: before a dense MLP, and before experts."""
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
"""Entries of Llama 3's rope_scaling, with the values that ``--use-rope-scaling`` always uses."""


def read(settings: Settings) -> Fields:
    """Return the configuration fields that cannot be copied unchanged from config.json.

    These fields describe attention heads, rotary positions, attention dropout and tied embeddings.
    """
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


def write(gpt: Gpt) -> dict[str, Any]:
    """Return the entries of config.json for the fields that `read` returns, except dropout."""
    return {
        "num_key_value_heads": gpt.model.num_query_groups or gpt.model.num_attention_heads,
        "head_dim": gpt.model.kv_channels,
        **write_rotary(gpt),
        "tie_word_embeddings": not gpt.model.untie_embeddings_and_output_weights,
    }


def read_rotary(settings: Settings) -> Fields:
    """Return the configuration fields of rotary positions.

    Raise a CheckpointError for an unknown kind of frequency scaling.
    """
    # transformers 4 stores the base beside the scaling, transformers 5 within it.
    given = dict(settings["rope_parameters"] or settings["rope_scaling"] or {})
    base = given.pop("rope_theta", settings["rope_theta"])
    partial = given.pop("partial_rotary_factor", settings["partial_rotary_factor"]) or 1.0
    fields = {"rotary_base": float(base), "rotary_percent": float(partial)}
    return fields | read_scaling_of(settings, given)


def read_scaling_of(settings: Settings, given: dict[str, Any]) -> Fields:
    """Return the configuration fields for a scaling of rotary frequencies; {} without scaling.

    ``given`` holds the entries of config.json that describe the scaling. Return the fields of
    megatron-core's flags if these can express the scaling, otherwise the field ``rope_scaling``.
    """
    kind = given.get("rope_type") or given.get("type") or "default"
    entries = {key for key, value in given.items() if value is not None} - {"rope_type", "type"}
    if kind == "default":
        settings.ignored.extend(f"rope_scaling.{key}" for key in sorted(entries))
        return {}
    factor = float(given.get("factor") or 1.0)
    # These flags can express only these entries; `read_scaling` handles or refuses all others.
    if (
        kind == "llama3"
        and entries <= {"factor", *LLAMA3_CONSTANTS}
        and all(given.get(x) == value for x, value in LLAMA3_CONSTANTS.items())
    ):
        return {"use_rope_scaling": True, "rope_scaling_factor": factor}
    if kind == "linear" and entries <= {"factor"} and factor.is_integer():
        return {"rotary_seq_len_interpolation_factor": int(factor)}
    original = settings["original_max_position_embeddings"]
    if original and kind in ("longrope", "yarn"):
        given.setdefault("original_max_position_embeddings", original)
    try:
        scaling = read_scaling(json.dumps(given), settings["max_position_embeddings"])
    except ValueError as error:
        raise CheckpointError(f"{settings.path} says a `rope_scaling` that {error}.") from error
    return {} if scaling is None else {"rope_scaling": written(scaling)}


def write_rotary(gpt: Gpt) -> dict[str, Any]:
    """Return the entries of config.json that describe the rotary positions of ``gpt``."""
    entries: dict[str, Any] = {
        "rope_theta": gpt.positions.rotary_base,
        "rope_scaling": write_scaling(gpt),
    }
    if gpt.positions.rotary_percent != 1:
        entries["partial_rotary_factor"] = gpt.positions.rotary_percent
    return entries


def write_scaling(gpt: Gpt) -> dict[str, Any] | None:
    """Return the scaling of rotary frequencies in transformers' form; None if there is none."""
    positions = gpt.positions
    if positions.use_rope_scaling:
        factor = positions.rope_scaling_factor
        return {"rope_type": "llama3", "factor": factor, **LLAMA3_CONSTANTS}
    divisor = positions.rotary_seq_len_interpolation_factor
    if divisor:
        return {"rope_type": "linear", "factor": float(divisor)}
    if positions.rope_scaling is None:
        return None
    scaling = parse_json(positions.rope_scaling, "--rope-scaling")
    # Anything but a mapping is refused by the check of the flag itself.
    return dict(scaling) if isinstance(scaling, dict) else None


def read_window(settings: Settings) -> Fields:
    """Return the configuration fields for the sliding window of attention; {} if there is none.

    If the entry ``layer_types`` is given, only the layers that it names have the window.
    transformers counts the query's own token as part of the window; our field counts only the
    tokens before it.
    """
    window = settings["sliding_window"]
    kinds = settings["layer_types"]
    has = [int(kind == "sliding_attention") for kind in kinds or ["sliding_attention"]]
    if not window or window >= settings["max_position_embeddings"] or not any(has):
        return {}
    fields: Fields = {"window_size": (int(window) - 1, 0)}
    return fields if all(has) else fields | {"window_attn_skip_freq": list_flag(has)}


def write_window(gpt: Gpt) -> dict[str, Any]:
    """Return the entry of config.json with the number of tokens in the window of ``gpt``."""
    window = gpt.attention.window_size
    return {"sliding_window": None if window is None else window[0] + 1}


def write_layer_types(gpt: Gpt) -> dict[str, Any]:
    """Return the entry ``layer_types``, which tells for each layer whether it has a window."""
    names = {False: "full_attention", True: "sliding_attention"}
    return {"layer_types": [names[has] for has in gpt.attention.windowed_layers(gpt.model)]}


def list_flag(layers: Iterable[int]) -> str:
    """Format numbers, one for each layer, as the value of a flag, such as ``[1,0]``."""
    return f"[{','.join(map(str, layers))}]"


def outer(vocab_size: int, *, prefix: str = "model.") -> dict[str, Parts]:
    """Return, by our name, which Hugging Face tensor holds each weight outside of layers.

    These are the embedding and the output layer, both with ``vocab_size`` rows, and the final norm.
    ``prefix`` begins the tensor names of the embedding and the norm.
    """
    embedding = Part(f"{prefix}embed_tokens.weight", vocab_size)
    head = "lm_head.weight"
    return {
        "embedding.word_embeddings.weight": (embedding,),
        "decoder.final_layernorm.weight": whole(f"{prefix}norm.weight"),
        "output_layer.weight": (Part(head, vocab_size),),
    }


def norms() -> dict[str, Parts]:
    """Return, by our name, which Hugging Face tensor holds each of a layer's two norms.

    We name the second norm differently in dense layers and in layers with experts; the result has
    both names.
    """
    second = whole(f"{LAYER}.post_attention_layernorm.weight")
    return {
        INPUT_NORM: whole(f"{LAYER}.input_layernorm.weight"),
        DENSE_NORM: second,
        EXPERT_NORM: second,
    }


def attention(gpt: Gpt) -> dict[str, Parts]:
    """Return, by our name, which Hugging Face tensors hold each parameter of attention.

    Queries, keys and values are one fused weight here, but three tensors in Hugging Face's files.
    """
    theirs = f"{LAYER}.self_attn"
    parts = {}
    for kind in ("weight", "bias"):
        parts[f"self_attention.linear_proj.{kind}"] = whole(f"{theirs}.o_proj.{kind}")
        names = [f"{theirs}.{part}_proj.{kind}" for part in "qkv"]
        parts[f"self_attention.linear_qkv.{kind}"] = grouped_qkv(gpt.model, *names)
    for part in "qk":
        norm = whole(f"{theirs}.{part}_norm.weight")
        parts[f"self_attention.{part}_layernorm.weight"] = norm
    return parts


def gated_mlp(
    ours: str = "mlp",
    theirs: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Parts]:
    """Return, by our name, which Hugging Face tensors hold each weight and bias of a gated MLP.

    Args:
        ours: path of the MLP within our layer.
        theirs: path of the MLP within a layer of the Hugging Face model.
        names: names of the gate, up and down projections in the Hugging Face model.
    """
    parts = {}
    for kind in ("weight", "bias"):
        gate, up, down = (f"{LAYER}.{theirs}.{name}.{kind}" for name in names)
        parts[f"{ours}.linear_fc1.{kind}"] = joined(gate, up)
        parts[f"{ours}.linear_fc2.{kind}"] = whole(down)
    return parts


def weights(gpt: Gpt, vocab_size: int) -> Table:
    """Return the weight table of a dense decoder whose Hugging Face tensors have Llama's names."""
    return Table(outer(vocab_size), {**norms(), **attention(gpt), **gated_mlp()})


def relative(changed: Mapping[str, Any], **attributes: Any) -> Family:
    """Return a family that differs from Llama only in the given arguments.

    Args:
        changed: configuration fields with the same value in all models of the family, by name; they
            are added to Llama's or replace them.
        attributes: attributes of `Family` that replace Llama's.
    """
    own = {"fixed": {**FIXED, **changed}, "same": SAME, "only": ONLY, "read": read, "write": write}
    return Family(**{**own, "weights": weights, **attributes})


def read_with_biases(settings: Settings) -> Fields:
    """Return the configuration fields of a Llama model, including those of its biases."""
    attention = bool(settings["attention_bias"])
    biases = {"add_qkv_bias": attention, "add_proj_bias": attention}
    return read(settings) | biases | {"add_mlp_bias": bool(settings["mlp_bias"])}


def write_with_biases(gpt: Gpt) -> dict[str, Any]:
    """Return the entries of config.json for a Llama model, including those of its biases."""
    biases = {"attention_bias": gpt.model.add_proj_bias, "mlp_bias": gpt.model.add_mlp_bias}
    return write(gpt) | biases


FAMILY = relative(
    {},
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=read_with_biases,
    write=write_with_biases,
)
