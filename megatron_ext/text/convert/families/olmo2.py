"""OLMo 2: norms of outputs only, and of queries and keys over all heads together."""

from megatron_ext.text.convert.families import llama

FAMILY = llama.BASE.but(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    says="norms of outputs only, norms over all heads of queries and keys",
    entries=(llama.ATTENTION_BIAS,),
    fixed={"qk_layernorm": True, "qk_layernorm_all_heads": True, "reordered_norm": True},
    weights=llama.WEIGHTS.but(
        layer={
            "self_attention.q_norm.weight": "self_attn.q_norm.weight",
            "self_attention.k_norm.weight": "self_attn.k_norm.weight",
            "post_self_attn_layernorm.{kind}": "post_attention_layernorm.{kind}",
            "post_mlp_layernorm.{kind}": "post_feedforward_layernorm.{kind}",
        },
        without=(
            "self_attention.q_layernorm",
            "self_attention.k_layernorm",
            "self_attention.linear_qkv.layer_norm",
            "input_layernorm",
            "mlp.linear_fc1.layer_norm",
            "pre_mlp_layernorm",
        ),
    ),
)
