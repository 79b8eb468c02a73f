"""Apertus: Llama with norms of queries and keys, and xIELU in place of gates."""

from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.weights import scalar

FAMILY = llama.BASE.but(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    says="norms of queries and keys, xIELU without gates, biases of attention",
    entries=(llama.ATTENTION_BIAS,),
    fixed={"qk_layernorm": True, "swiglu": False, "xielu": True},
    only={"hidden_act": "xielu"},
    weights=llama.WEIGHTS.but(
        layer={
            "mlp.linear_fc1.{kind}": "mlp.up_proj.{kind}",
            "mlp.activation_func.alpha_p": "mlp.act_fn.alpha_p",
            "mlp.activation_func.alpha_n": "mlp.act_fn.alpha_n",
            "mlp.activation_func.beta": scalar("mlp.act_fn.beta"),
            "mlp.activation_func.eps": scalar("mlp.act_fn.eps"),
        },
        renamed={
            "input_layernorm": "attention_layernorm",
            "post_attention_layernorm": "feedforward_layernorm",
        },
    ),
)
