"""Kimi K2: DeepSeek-V3 under another name, with code and a tokenizer of its own in the folder."""

from megatron_ext.text.convert.families import deepseek_v3

FAMILY = deepseek_v3.FAMILY.but(
    model_type="kimi_k2",
    architecture="DeepseekV3ForCausalLM",
    says="DeepSeek-V3 under another name; the folder's code is copied, not run",
    weights=deepseek_v3.FAMILY.weights,
    known_as="deepseek_v3",
)
