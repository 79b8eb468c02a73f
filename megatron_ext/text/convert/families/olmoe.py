"""OLMoE and FlexOLMo: OLMo with experts in every layer, and norms over all heads."""

from megatron_ext.text.convert.entries import Copy, Switch
from megatron_ext.text.convert.families import llama, mixtral, olmo2, qwen2_moe

_ROUTER = (
    Copy("num_experts", "num_experts"),
    Copy("moe_router_topk", "num_experts_per_tok"),
    mixtral.WIDTH,
    # Scores that are not renormalized come from a softmax over all experts, before the choice.
    Switch("norm_topk_prob", ("moe_router_pre_softmax",), negated=True),
)
OLMOE = llama.BASE.but(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    says="experts in every layer, norms over all heads of queries and keys",
    entries=(llama.ATTENTION_BIAS, *_ROUTER),
    fixed={"qk_layernorm": True, "qk_layernorm_all_heads": True},
    only={"clip_qkv": None},
    weights=llama.WEIGHTS.but(
        without=("self_attention.q_layernorm", "self_attention.k_layernorm"),
        layer={
            "self_attention.q_norm.weight": "self_attn.q_norm.weight",
            "self_attention.k_norm.weight": "self_attn.k_norm.weight",
            **qwen2_moe.EXPERTS,
        },
    ),
)
FLEX_OLMO = olmo2.FAMILY.but(
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    says="OLMo 2 with experts in every layer",
    entries=_ROUTER,
    weights=olmo2.FAMILY.weights.but(layer=qwen2_moe.EXPERTS),
)
FAMILIES = (OLMOE, FLEX_OLMO)
