"""Helium: Llama in which neighbouring channels turn together."""

from megatron_ext.text.convert.entries import Switch
from megatron_ext.text.convert.families import llama

FAMILY = llama.BASE.but(
    model_type="helium",
    architecture="HeliumForCausalLM",
    says="neighbouring channels turn together; biases of queries, keys and values, and of MLPs",
    entries=(Switch("attention_bias", ("add_qkv_bias",)), Switch("mlp_bias", ("add_mlp_bias",))),
    fixed={"rotary_interleaved": True},
)
