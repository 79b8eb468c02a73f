"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from typing import Any

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.moe import MoEConfig
from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Settings


def read_window(settings: Settings) -> Fields:
    """Return the field of a sliding window that all layers have, or none."""
    if not settings["use_sliding_window"]:
        return {}
    found = llama.read_window(settings)
    kinds = set(settings["layer_types"] or ["sliding_attention"])
    if found and kinds == {"sliding_attention"}:
        return found
    if found and kinds != {"full_attention"}:
        settings.refuse(
            "sliding_window", advice="use a model whose layers all have it, or none of them"
        )
    return {}


def write_window(model: ModelConfig) -> dict[str, Any]:
    """Return the entries of config.json that `read_window` reads."""
    if model.window_size is None:
        return {"use_sliding_window": False}
    all_layers = {"max_window_layers": 0, "layer_types": None}
    return {"use_sliding_window": True, **all_layers, **llama.write_window(model)}


def read(settings: Settings) -> Fields:
    return llama.read(settings) | read_window(settings)


def write(model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    return llama.write(model, moe) | write_window(model)


FAMILY = llama.relative(
    {"add_qkv_bias": True},
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=read,
    write=write,
)
