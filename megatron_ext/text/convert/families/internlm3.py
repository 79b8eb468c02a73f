"""InternLM3, which transformers reads as a Llama with biases everywhere or nowhere."""

from megatron_ext.text.convert.families import llama

FAMILY = llama.FAMILY.but(
    model_type="internlm3",
    architecture="LlamaForCausalLM",
    says="Llama under another name",
)
