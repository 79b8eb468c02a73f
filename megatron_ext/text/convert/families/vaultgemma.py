"""VaultGemma: Gemma 2 without the norms after attention and MLP."""

from megatron_ext.text.convert.families import gemma2, llama

FAMILY = gemma2.FAMILY.but(
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    says="no norms after attention and MLP",
    entries=(llama.ATTENTION_BIAS,),
    fixed={"sandwich_norm": False},
    without=("use_bidirectional_attention",),
    weights=llama.WEIGHTS.but(renamed={"post_attention_layernorm": "pre_feedforward_layernorm"}),
)
