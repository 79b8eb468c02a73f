"""Translates the config.json of a transformers model into our flags, and back.

Sources: the configuration classes and ``modeling_rope_utils.py`` of transformers, and the
RotaryEmbedding of megatron-core.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.checkpoint.conversion import read_settings
from megatron_ext.config.flags import flags_of
from megatron_ext.config.model import ModelConfig
from megatron_ext.errors import CheckpointError

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The values of `model_type` that can be converted, with their classes in transformers."""
LLAMA3_CONSTANTS = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
"""The fixed constants of megatron-core's ``--use-rope-scaling``; only its factor is a flag."""


@dataclass(frozen=True)
class HuggingFaceModel:
    """The config.json of a Hugging Face model, as read and as our flags.

    Attributes:
        family: a key of `FAMILIES`, such as "llama".
        raw: the content of the file.
        fields: the corresponding values of `ModelConfig`, by field.
    """

    family: str
    raw: dict[str, Any]
    fields: dict[str, Any]
    vocab_size: int


def read_model(folder: Path) -> HuggingFaceModel:
    """Return the model of a folder's config.json; raise a CheckpointError for an unusable file."""
    path = folder / "config.json"
    return understand(read_settings(path, "give a folder of a Hugging Face model."), path)


def understand(raw: dict[str, Any], path: Path) -> HuggingFaceModel:
    """Return the model that ``raw``, the content of the config.json at ``path``, describes.

    Raise a CheckpointError if our flags cannot describe it.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{path} says `model_type` {family!r}, which cannot be converted; use one of "
            f"{', '.join(FAMILIES)}."
        )
    values = _with_defaults(path, raw)
    _refuse_what_is_not_here(path, raw, values)
    fields = _fields(path, family, values)
    return HuggingFaceModel(family, raw, fields, int(values["vocab_size"]))


def _with_defaults(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the entries ``raw`` of config.json, with transformers' defaults for missing ones."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise CheckpointError(
            "Hugging Face models need transformers; install `megatron-ext[hf]`."
        ) from error
    try:
        config = AutoConfig.for_model(**raw)
    # Each version of transformers has its own kinds of error for a bad entry.
    except Exception as error:
        reason = str(error).strip().splitlines()[0].rstrip(".:")
        raise CheckpointError(f"{path} is refused by transformers ({reason}); mend it.") from error
    return dict(config.to_dict())


def _refuse_what_is_not_here(path: Path, raw: dict[str, Any], values: dict[str, Any]) -> None:
    """Raise a CheckpointError for a feature that conversion would lose, such as quantization."""
    family = raw["model_type"]
    architectures = raw.get("architectures") or [FAMILIES[family]]
    unusual = {
        "architectures": architectures if architectures != [FAMILIES[family]] else None,
        "quantization_config": raw.get("quantization_config"),
        "hidden_act": values["hidden_act"] if values["hidden_act"] != "silu" else None,
        "attention_bias": values.get("attention_bias"),
        "mlp_bias": values.get("mlp_bias"),
        "sliding_window": _window(values),
    }
    for name, value in unusual.items():
        if value:
            raise CheckpointError(
                f"{path} says `{name}` {value!r}, which the converted model would not have; use a "
                "dense model without it."
            )


def _window(values: Mapping[str, Any]) -> int | None:
    """Return the size of the attention window in tokens; None if no window hides a token."""
    if not values.get("use_sliding_window", True):
        return None
    window = values.get("sliding_window")
    return window if window and window < values["max_position_embeddings"] else None


def _fields(path: Path, family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    heads = int(values["num_attention_heads"])
    groups = int(values.get("num_key_value_heads") or heads)
    return {
        "num_layers": int(values["num_hidden_layers"]),
        "hidden_size": int(values["hidden_size"]),
        "ffn_hidden_size": int(values["intermediate_size"]),
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "kv_channels": int(values.get("head_dim") or values["hidden_size"] // heads),
        "max_position_embeddings": int(values["max_position_embeddings"]),
        "position_embedding_type": "rope",
        **_rotary_fields(path, values),
        "normalization": "RMSNorm",
        "norm_epsilon": float(values["rms_norm_eps"]),
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": family == "qwen2",
        "qk_layernorm": family == "qwen3",
        "untie_embeddings_and_output_weights": not values["tie_word_embeddings"],
        "attention_dropout": float(values.get("attention_dropout") or 0.0),
        "hidden_dropout": 0.0,
    }


def _rotary_fields(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 4 keeps the base beside the scaling, and transformers 5 keeps it within.
    scaling = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    base = scaling.get("rope_theta", values.get("rope_theta"))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    partial = scaling.get("partial_rotary_factor", values.get("partial_rotary_factor")) or 1.0
    if base is None or int(base) != base or partial != 1:
        raise CheckpointError(
            f"{path} says `rope_theta` {base!r} with `partial_rotary_factor` {partial!r}, but "
            "`--rotary-base` must be an integer and whole heads rotate; use another model."
        )
    fields: dict[str, Any] = {"rotary_base": int(base)}
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
        f"{path} says `rope_scaling` {shown}, which our flags cannot describe; linear with an "
        f"integer factor, and llama3 with {known}, can be converted."
    )


def words_of(fields: Mapping[str, Any]) -> list[str]:
    """Return `ModelConfig` values as command-line words, leaving out default values."""
    words: list[str] = []
    for flag in flags_of("model", ModelConfig):
        value = fields.get(flag.field, flag.default)
        if value != flag.default:
            words += [flag.shown] if flag.type is bool else [flag.shown, str(value)]
    return words


def config_json(
    model: ModelConfig, *, vocab_size: int, dtype: torch.dtype, like: HuggingFaceModel | None
) -> dict[str, Any]:
    """Return the config.json of our model, with further entries taken from ``like``.

    Raise a CheckpointError if the model fits none of `FAMILIES`, or differs from ``like``.
    """
    family = _family(model, like)
    rotary: dict[str, Any] = {"rope_theta": float(model.rotary_base), "rope_scaling": None}
    if model.use_rope_scaling:
        factor = model.rope_scaling_factor
        rotary["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **LLAMA3_CONSTANTS}
    elif model.rotary_seq_len_interpolation_factor:
        factor = float(model.rotary_seq_len_interpolation_factor)
        rotary["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    # transformers' own defaults are token ids of the first Llama.
    longest, base = 0, dict[str, Any](bos_token_id=None, eos_token_id=None)
    if like is not None:
        longest, base = like.fields["max_position_embeddings"], dict(like.raw)
        for name in ("rope_parameters", "dtype"):  # all versions of transformers read rope_theta
            base.pop(name, None)
    return {
        **base,
        **({"sliding_window": None} if family == "mistral" else {}),
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups or model.num_attention_heads,
        "head_dim": model.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": max(model.max_position_embeddings or 0, longest),
        "rms_norm_eps": model.norm_epsilon,
        **rotary,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "vocab_size": vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


_ALIKE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "add_qkv_bias qk_layernorm"
).split()


def _family(model: ModelConfig, like: HuggingFaceModel | None) -> str:
    required = {
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "normalization": "RMSNorm",
        "apply_layernorm_1p": False,
        "swiglu": True,
        "add_bias_linear": False,
        "mtp_num_layers": None,
    }
    for name, value in required.items():
        if getattr(model, name) != value:
            raise CheckpointError(
                f"The checkpoint's `--{name.replace('_', '-')}` is {getattr(model, name)!r}, but "
                "Hugging Face's "
                f"{', '.join(FAMILIES)} have {value!r}; it cannot be exported as one of them."
            )
    if like is not None:
        for name in _ALIKE:
            ours, theirs = getattr(model, name), like.fields[name]
            if ours != theirs:
                raise CheckpointError(
                    f"The checkpoint's `--{name.replace('_', '-')}` is {ours!r}, but `--hf-like` "
                    f"is a model with {theirs!r}; give the folder that the checkpoint began with."
                )
        return like.family
    if model.add_qkv_bias and model.qk_layernorm:
        raise CheckpointError(
            "The checkpoint has both `--add-qkv-bias` and `--qk-layernorm`, but Hugging Face's "
            f"{', '.join(FAMILIES)} have at most one of them; it cannot be exported."
        )
    if model.qk_layernorm:
        return "qwen3"
    return "qwen2" if model.add_qkv_bias else "llama"
