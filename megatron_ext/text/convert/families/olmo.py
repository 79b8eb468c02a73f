"""OLMo 1: Llama with LayerNorm that has no weights."""

from megatron_ext.text.convert.families import llama

FAMILY = llama.BASE.but(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    says="norms without weights",
    entries=(llama.ATTENTION_BIAS,),
    fixed={
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "norm_elementwise_affine": False,
    },
    only={"clip_qkv": None},
)
