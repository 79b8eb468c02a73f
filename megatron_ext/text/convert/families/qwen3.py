"""Qwen3: Llama with query and key norms."""

from typing import Any

from megatron_ext.text.convert.families import llama, qwen2
from megatron_ext.text.convert.family import Fields, Gpt, Settings


def read(settings: Settings) -> Fields:
    """Return the configuration fields of a Qwen3 model, including the biases of attention."""
    biases = dict.fromkeys(("add_qkv_bias", "add_proj_bias"), bool(settings["attention_bias"]))
    return qwen2.read(settings) | biases


def write(gpt: Gpt) -> dict[str, Any]:
    return qwen2.write(gpt) | {"attention_bias": gpt.model.add_proj_bias}


FAMILY = llama.relative(
    {"qk_layernorm": True},
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=read,
    write=write,
)
