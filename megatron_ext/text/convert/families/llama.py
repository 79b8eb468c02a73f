"""Llama, and `BASE`: what most decoders share, from which their families are derived."""

from megatron_ext.text.convert.entries import TIED, Dropout, Heads, Rotary, Switch, copies
from megatron_ext.text.convert.family import Family
from megatron_ext.text.convert.weights import Weights, joined, separate_qkv, vocabulary

WEIGHTS = Weights.of(
    "model.layers.{layer}",
    outer={
        "embedding.word_embeddings.weight": vocabulary("model.embed_tokens.weight"),
        "decoder.final_layernorm.{kind}": "model.norm.{kind}",
        "output_layer.{kind}": vocabulary("lm_head.{kind}"),
    },
    layer={
        # A norm before attention or a dense MLP is named after the projection that follows it.
        "self_attention.linear_qkv.layer_norm_{kind}": "input_layernorm.{kind}",
        "input_layernorm.{kind}": "input_layernorm.{kind}",
        "self_attention.linear_qkv.{kind}": separate_qkv(
            "self_attn.q_proj.{kind}", "self_attn.k_proj.{kind}", "self_attn.v_proj.{kind}"
        ),
        "self_attention.q_layernorm.{kind}": "self_attn.q_norm.{kind}",
        "self_attention.k_layernorm.{kind}": "self_attn.k_norm.{kind}",
        "self_attention.linear_proj.{kind}": "self_attn.o_proj.{kind}",
        "mlp.linear_fc1.layer_norm_{kind}": "post_attention_layernorm.{kind}",
        "pre_mlp_layernorm.{kind}": "post_attention_layernorm.{kind}",
        "mlp.linear_fc1.{kind}": joined("mlp.gate_proj.{kind}", "mlp.up_proj.{kind}"),
        "mlp.linear_fc2.{kind}": "mlp.down_proj.{kind}",
    },
)
BASE = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    says="",
    entries=(
        *copies(
            {
                "num_layers": "num_hidden_layers",
                "hidden_size": "hidden_size",
                "ffn_hidden_size": "intermediate_size",
                "max_position_embeddings": "max_position_embeddings",
                "norm_epsilon": "rms_norm_eps",
            }
        ),
        Heads(),
        Rotary(),
        TIED,
        Dropout("attention_dropout", "attention_dropout"),
    ),
    fixed={
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
    },
    only={"hidden_act": "silu"},
    weights=WEIGHTS,
)
"""A decoder with RMSNorm, rotary positions, gated SiLU, and no biases."""
ATTENTION_BIAS = Switch("attention_bias", ("add_qkv_bias", "add_proj_bias"))
FAMILY = BASE.but(
    model_type="llama",
    architecture="LlamaForCausalLM",
    says="biases of attention and MLP, every scaling of rotary positions",
    entries=(ATTENTION_BIAS, Switch("mlp_bias", ("add_mlp_bias",))),
)
