"""Qwen2 and Qwen2.5: Llama with biases in the projections of queries, keys and values."""

from typing import Any

from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings


def read(settings: Settings) -> Fields:
    fields = llama.read(settings)
    return fields | llama.read_window(settings) if settings["use_sliding_window"] else fields


def write(gpt: Gpt) -> dict[str, Any]:
    entries = llama.write(gpt) | {"use_sliding_window": gpt.attention.window_size is not None}
    if gpt.attention.window_size is None:
        return entries
    return entries | llama.write_window(gpt) | llama.write_layer_types(gpt)


FAMILY = llama.relative(
    {"add_qkv_bias": True},
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=read,
    write=write,
)
