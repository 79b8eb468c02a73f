"""GPT-NeoX and Pythia: attention and MLP side by side, LayerNorm, biases, partly rotary heads."""

from megatron_ext.text.convert.entries import (
    ACTIVATIONS,
    Choice,
    Copy,
    Dropout,
    Heads,
    Rotary,
    Switch,
)
from megatron_ext.text.convert.families import llama

UNGATED = {
    "normalization": "LayerNorm",
    "swiglu": False,
}
"""Our fields of decoders with LayerNorm and an MLP without a gate."""
FAMILY = llama.BASE.but(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    says="attention and MLP side by side, each with a LayerNorm; partly rotary heads",
    entries=(
        Heads(groups=None, size=None),
        Copy("norm_epsilon", "layer_norm_eps"),
        Choice("hidden_act", ACTIVATIONS),
        Rotary(share="rotary_pct", base="rotary_emb_base", share_always=True),
        Switch("use_parallel_residual", ("use_parallel_residual",)),
        llama.ATTENTION_BIAS,
        Dropout("hidden_dropout", "hidden_dropout"),
    ),
    fixed={**UNGATED, "add_mlp_bias": True},
    weights=llama.WEIGHTS.but(
        renamed={
            "model.layers": "gpt_neox.layers",
            "model.embed_tokens": "gpt_neox.embed_in",
            "model.norm": "gpt_neox.final_layer_norm",
            "lm_head": "embed_out",
            "self_attn.o_proj": "attention.dense",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        layer={
            "self_attention.linear_qkv.{kind}": "attention.query_key_value.{kind}",
            "mlp.linear_fc1.{kind}": "mlp.dense_h_to_4h.{kind}",
        },
    ),
)
