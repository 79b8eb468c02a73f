"""StableLM: Llama with LayerNorm, partly rotary heads, and MLPs that may be beside attention."""

from megatron_ext.text.convert.entries import Copy, Heads, Rotary, Switch
from megatron_ext.text.convert.families import llama

ONE_NORM = ("use_parallel_residual", "shared_input_norm")
"""Our fields of attention and MLP side by side, behind one norm."""
FAMILY = llama.BASE.but(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    says="LayerNorm, biases of queries, keys and values, partly rotary heads",
    entries=(
        Heads(size=None),
        Copy("norm_epsilon", "layer_norm_eps"),
        Rotary(share_always=True),
        Switch("use_parallel_residual", ONE_NORM),
        Switch("use_qkv_bias", ("add_qkv_bias",)),
    ),
    fixed={"normalization": "LayerNorm"},
    only={"qk_layernorm": False, "hidden_dropout": 0.0},
)
