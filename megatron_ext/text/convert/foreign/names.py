"""Translates names of parameters of older Megatron-LM and of Megatron-DeepSpeed to today's.

Three kinds of names are known: those of megatron-core; those of Megatron-LM before it, which begin
with ``language_model``; and those of Megatron-DeepSpeed's pipeline, which begin with the number of
a stage's module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_ext.errors import CheckpointError

_IN_LAYER = (
    (re.compile(r"^(self_attention|attention)\.query_key_value\."), "self_attention.linear_qkv."),
    (re.compile(r"^(self_attention|attention)\.dense\."), "self_attention.linear_proj."),
    (re.compile(r"^mlp\.dense_h_to_4h\."), "mlp.linear_fc1."),
    (re.compile(r"^mlp\.dense_4h_to_h\."), "mlp.linear_fc2."),
    (re.compile(r"^input_(layer)?norm\."), "input_layernorm."),
    (re.compile(r"^post_attention_(layer)?norm\."), "pre_mlp_layernorm."),
)
"""Patterns of older names within a layer, and what takes the place of the match."""
_LAYER = re.compile(r"^language_model\.(?:encoder|transformer)\.layers\.(\d+)\.(.+)$")
_FINAL_NORM = re.compile(r"^language_model\.(?:encoder|transformer)\.final_(?:layer)?norm\.(\w+)$")
_OUTER = {
    "language_model.embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "language_model.embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "language_model.output_layer.weight": "output_layer.weight",
    # The last stage's copy of a tied embedding.
    "word_embeddings_for_head.weight": "output_layer.weight",
    "word_embeddings.weight": "output_layer.weight",
}
_MODULE = re.compile(r"^(\d+)\.(.+)$")
_TIED = "tied_modules.embed."
_EXPERT = re.compile(r"^(.*mlp\.experts\.)(?:local_experts\.(\d+)\.)?(linear_fc\d)\.(\w+?)(\d*)$")
_DERIVED = re.compile(
    r"(^|\.)(rotary_pos_emb|rotary_emb)\.|\.(inv_freq|local_tokens_per_expert|global_tokens_per"
    r"_expert|max_attn_logits)$"
)
_SCALES = re.compile(r"\._extra_state\w*(\[\d+\])*$")


def flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in a mapping of mappings by their names, joined with dots."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": each for inner, each in flattened(value).items()}
        else:
            flat[str(name)] = value
    return flat


def reason_to_skip(name: str) -> str | None:
    """Return why a checkpoint's entry is not a weight that is imported; None if it is one."""
    if _SCALES.search(name):
        return "state of Transformer Engine, such as scales of fp8, which starts anew"
    if _DERIVED.search(name):
        return "computed from the flags"
    return None


def core_name(name: str) -> str:
    """Return megatron-core's name of a parameter that has it, or its name of before the core.

    Wrappers' prefixes, such as ``module.``, are left out.
    """
    while name.startswith(("module.", "model.")):
        name = name.partition(".")[2]
    layer = _LAYER.match(name)
    if layer is not None:
        return f"decoder.layers.{layer[1]}.{in_layer(layer[2])}"
    norm = _FINAL_NORM.match(name)
    if norm is not None:
        return f"decoder.final_layernorm.{norm[1]}"
    return _OUTER.get(name, name).replace(".mtp_model_layer.", ".transformer_layer.")


def in_layer(rest: str) -> str:
    """Return megatron-core's name of a parameter within a layer, given its older name."""
    for pattern, ours in _IN_LAYER:
        if pattern.match(rest):
            return pattern.sub(ours, rest)
    return rest


def with_expert(name: str, first: int = 0) -> str:
    """Return a parameter's name with its expert's index in brackets, if it belongs to one.

    The index is ``first`` plus the number in the name. `source.key_of` parses such names.
    """
    match = _EXPERT.match(name)
    number = match and (match[2] or match[5])
    if not match or not number:
        return name
    layer = re.match(r"(decoder|mtp)\.layers\.(\d+)\.(.*)$", match[1])
    if layer is None:
        return name
    inner = layer[3].replace("mlp.experts.", "mlp.experts.experts.")
    return f"{layer[1]}.layers.{inner}{match[3]}.{match[4]}[{layer[2]}][{first + int(number)}]"


def pipeline_names(names: Iterable[str]) -> dict[str, str]:
    """Return megatron-core's names of the parameters of a Megatron-DeepSpeed pipeline, by theirs.

    The modules of a pipeline are numbered: an embedding, the layers, the final norm, and the head.
    """
    modules = {name: _MODULE.match(name) for name in names}
    layers = sorted(
        {int(match[1]) for match in modules.values() if match and "layernorm." in match[2]}
    )
    number_of = {module: layer for layer, module in enumerate(layers)}
    translated = {}
    for name, match in modules.items():
        if match is None:
            if name.startswith(_TIED):
                translated[name] = f"embedding.{name.removeprefix(_TIED)}"
            continue
        module = int(match[1])
        rest = match[2]
        if module in number_of:
            translated[name] = f"decoder.layers.{number_of[module]}.{in_layer(rest)}"
        elif rest in ("weight", "bias") and layers and module > layers[-1]:
            translated[name] = f"decoder.final_layernorm.{rest}"
        elif rest == "lm_head.weight" or (layers and module > layers[-1]):
            translated[name] = "output_layer.weight"
        else:
            translated[name] = f"embedding.{rest}"
    return translated


def check_names(names: Sequence[str], place: object) -> None:
    """Raise a CheckpointError if the names are those of a Hugging Face model."""
    if any(name.removeprefix("module.").startswith("model.layers.") for name in names):
        raise CheckpointError(
            f"{place} holds a Hugging Face model (`model.layers`); write it as safetensors with "
            "DeepSpeed's zero_to_fp32.py beside the model's config.json, and import that folder "
            "with `--hf`."
        )
