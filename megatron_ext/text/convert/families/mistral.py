"""Mistral: Llama with a sliding window, if its config.json gives one."""

from typing import Any

from megatron_ext.config.model import ModelConfig
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Settings


def read(settings: Settings) -> Fields:
    return llama.read(settings) | llama.read_window(settings)


def write(model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    return llama.write(model, moe) | llama.write_window(model)


FAMILY = llama.relative(
    {}, model_type="mistral", architecture="MistralForCausalLM", read=read, write=write
)
