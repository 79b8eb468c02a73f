"""ERNIE 4.5, dense: Llama in which neighbouring channels turn together."""

from megatron_ext.text.convert.entries import Switch
from megatron_ext.text.convert.families import llama

FAMILY = llama.BASE.but(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    says="neighbouring channels turn together; biases everywhere or nowhere",
    entries=(Switch("use_bias", ("add_qkv_bias", "add_proj_bias", "add_mlp_bias")),),
    fixed={"rotary_interleaved": True},
    without=("attention_dropout",),
)
