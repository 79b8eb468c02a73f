"""Qwen3: Qwen2 with norms of queries and keys, and biases only where its config.json says so."""

from megatron_ext.text.convert.families import llama, qwen2

FAMILY = qwen2.FAMILY.but(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    says="norms of queries and keys; biases of attention",
    entries=(llama.ATTENTION_BIAS,),
    fixed={"qk_layernorm": True},
)
