"""Mistral: Llama with a sliding window, if its config.json gives one."""

from megatron_ext.text.convert.entries import Window
from megatron_ext.text.convert.families import llama

FAMILY = llama.BASE.but(
    model_type="mistral",
    architecture="MistralForCausalLM",
    says="sliding windows",
    entries=(Window(),),
)
