"""Phi-3 and Phi-4: Mistral with fused projections."""

from megatron_ext.text.convert.families import llama, mistral
from megatron_ext.text.convert.weights import fused_qkv_of

FAMILY = mistral.FAMILY.but(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    says="fused projections, partly rotary heads, LongRoPE",
    weights=llama.WEIGHTS.but(
        layer={
            "self_attention.linear_qkv.{kind}": fused_qkv_of("self_attn.qkv_proj.{kind}"),
            "mlp.linear_fc1.{kind}": "mlp.gate_up_proj.{kind}",
        }
    ),
)
