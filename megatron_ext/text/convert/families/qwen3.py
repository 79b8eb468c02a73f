"""Qwen3: Llama with norms of queries and keys."""

from megatron_ext.text.convert.families import llama, qwen2

FAMILY = llama.relative(
    {"qk_layernorm": True},
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    only=llama.ONLY | {"attention_bias": False},
    read=qwen2.read,
    write=qwen2.write,
)
