"""The families of Hugging Face models that can be converted, one file each."""

from megatron_ext.text.convert.families import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    glm4_moe,
    gpt2,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)

_DENSE = (llama, mistral, qwen2, qwen3, phi3, gpt2, gemma2, gemma3)
_EXPERTS = (mixtral, qwen2_moe, qwen3_moe, gpt_oss, glm4_moe, deepseek_v2, deepseek_v3)
FAMILIES = {module.FAMILY.model_type: module.FAMILY for module in (*_DENSE, *_EXPERTS)}
"""Families by `model_type`. A model trained from scratch is exported as the first family that fits.
"""
