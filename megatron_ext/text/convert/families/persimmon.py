"""Persimmon: LayerNorm, also of queries and keys, squared ReLU, biases, partly rotary heads."""

from megatron_ext.text.convert.entries import ACTIVATIONS, Choice, Copy, Heads, Rotary, Switch
from megatron_ext.text.convert.families import gpt_neox, llama

FAMILY = llama.BASE.but(
    model_type="persimmon",
    architecture="PersimmonForCausalLM",
    says="LayerNorm, norms of queries and keys, squared ReLU, biases, partly rotary heads",
    entries=(
        Heads(groups=None, size=None),
        Copy("norm_epsilon", "layer_norm_eps"),
        Choice("hidden_act", {"relu2": ACTIVATIONS["relu2"], **ACTIVATIONS}),
        Rotary(share_always=True),
        Switch("qk_layernorm", ("qk_layernorm",)),
    ),
    fixed={
        **gpt_neox.UNGATED,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "add_proj_bias": True,
    },
    only={"hidden_dropout": 0.0},
    weights=llama.WEIGHTS.but(
        renamed={
            "model.norm": "model.final_layernorm",
            "self_attn.o_proj": "self_attn.dense",
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        layer={
            "self_attention.linear_qkv.{kind}": "self_attn.query_key_value.{kind}",
            "mlp.linear_fc1.{kind}": "mlp.dense_h_to_4h.{kind}",
        },
    ),
)
