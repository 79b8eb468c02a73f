"""The families of Hugging Face models that can be converted, one file each."""

from megatron_ext.text.convert.families import (
    gpt2,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)

FAMILIES = {
    module.FAMILY.model_type: module.FAMILY
    for module in (llama, mistral, qwen2, qwen3, phi3, gpt2, mixtral, qwen2_moe, qwen3_moe)
}
"""Families by `model_type`; a model without an origin is exported as the first that fits."""
