"""Hunyuan, dense: Llama whose queries and keys are normalized after their rotation."""

from megatron_ext.text.convert.entries import Rotary, Translated
from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Settings

ROTARY = Rotary()


def _read(settings: Settings) -> Fields:
    """Translate a scaling of type dynamic with ``alpha``, which means a larger base."""
    given = dict(settings["rope_parameters"] or settings["rope_scaling"] or {})
    alpha = given.get("alpha")
    if alpha and given.get("rope_type") == "dynamic":
        size = settings["head_dim"]
        base = given["rope_theta"] * alpha ** (size / (size - 2))
        given = {"rope_theta": base, "rope_type": "default"}
    return ROTARY.read(settings.replaced(rope_parameters=given))


ALPHA = Translated(ROTARY.fields, ROTARY.keys, _read, ROTARY.write, ROTARY.limits())
"""Rotary positions, whose base may be given by ``alpha``."""
NORMS = {
    "self_attention.rotated_q_layernorm.{kind}": "self_attn.query_layernorm.{kind}",
    "self_attention.rotated_k_layernorm.{kind}": "self_attn.key_layernorm.{kind}",
}
"""The sources of the norms of queries and keys."""
FAMILY = llama.BASE.but(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    says="norms of queries and keys after their rotation; a base given by alpha; biases",
    entries=(ALPHA, llama.ATTENTION_BIAS),
    fixed={"qk_layernorm": True, "qk_layernorm_after_rope": True},
    weights=llama.WEIGHTS.but(layer=NORMS),
)
