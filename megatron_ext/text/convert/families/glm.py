"""GLM-4 of 2024 and of 2025: partly rotary heads, whose neighbouring channels turn together."""

from megatron_ext.text.convert.entries import Rotary, Switch
from megatron_ext.text.convert.families import llama

GLM = llama.BASE.but(
    model_type="glm",
    architecture="GlmForCausalLM",
    says="neighbouring channels turn together, half of each head; fused gates; biases of queries, "
    "keys and values",
    entries=(
        Rotary(share_always=True, default_share=0.5),
        Switch("attention_bias", ("add_qkv_bias",)),
    ),
    fixed={"rotary_interleaved": True},
    weights=llama.WEIGHTS.but(layer={"mlp.linear_fc1.{kind}": "mlp.gate_up_proj.{kind}"}),
)
GLM4 = GLM.but(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    says="norms before and after",
    fixed={"sandwich_norm": True},
    weights=GLM.weights.but(
        layer={
            "post_self_attn_layernorm.{kind}": "post_self_attn_layernorm.{kind}",
            "post_mlp_layernorm.{kind}": "post_mlp_layernorm.{kind}",
        }
    ),
)
FAMILIES = (GLM, GLM4)
