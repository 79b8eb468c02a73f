"""Mistral: Llama with a sliding window, if its config.json gives one."""

from typing import Any

from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings


def read(settings: Settings) -> Fields:
    return llama.read(settings) | llama.read_window(settings)


def write(gpt: Gpt) -> dict[str, Any]:
    return llama.write(gpt) | llama.write_window(gpt)


FAMILY = llama.relative(
    {}, model_type="mistral", architecture="MistralForCausalLM", read=read, write=write
)
