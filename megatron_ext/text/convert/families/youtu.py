"""Youtu: a dense decoder with DeepSeek-V3's latent attention."""

from megatron_ext.text.convert.families import deepseek_v3, llama

FAMILY = llama.BASE.but(
    model_type="youtu",
    architecture="YoutuForCausalLM",
    says="latent attention without experts",
    entries=deepseek_v3.LATENT,
    fixed={"multi_latent_attention": True, "qk_layernorm": True},
    only={"attention_bias": False, "rope_interleave": True},
    weights=deepseek_v3.LATENT_WEIGHTS,
)
