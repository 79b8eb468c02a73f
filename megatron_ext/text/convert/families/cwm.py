"""Code World Model: Llama 3.1 with windows in most layers."""

from megatron_ext.text.convert.entries import Switch, Window
from megatron_ext.text.convert.families import llama

FAMILY = llama.BASE.but(
    model_type="cwm",
    architecture="CwmForCausalLM",
    says="windows in most layers; biases of MLPs",
    entries=(Window(types="always"), Switch("mlp_bias", ("add_mlp_bias",))),
)
