"""Qwen2 and Qwen2.5: Llama with biases in the projections of queries, keys and values."""

from megatron_ext.text.convert.entries import Window
from megatron_ext.text.convert.families import llama

FAMILY = llama.BASE.but(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    says="biases of queries, keys and values; windows in some layers",
    entries=(Window(switch="use_sliding_window", types="window"),),
    fixed={"add_qkv_bias": True},
)
