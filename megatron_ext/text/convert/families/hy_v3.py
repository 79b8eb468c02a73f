"""Hunyuan 3 (Hy3): Qwen3's attention, and experts with sigmoid scores and a bias."""

from megatron_ext.text.convert.entries import copies
from megatron_ext.text.convert.families import deepseek_v3, llama, qwen2_moe

FAMILY = llama.BASE.but(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    says="norms of queries and keys, sigmoid scores, bias of experts",
    entries=(
        *copies({"num_experts": "num_experts", "moe_router_topk": "num_experts_per_tok"}),
        deepseek_v3.MLP_TYPES,
        deepseek_v3.widths("num_shared_experts"),
        deepseek_v3.scaled("router_scaling_factor"),
        llama.ATTENTION_BIAS,
    ),
    fixed={"qk_layernorm": True, **deepseek_v3.BIASED_ROUTER},
    only={"mlp_bias": False},
    weights=llama.WEIGHTS.but(
        layer={
            **qwen2_moe.EXPERTS,
            **qwen2_moe.shared_experts("mlp.shared_mlp"),
            "mlp.router.weight": "mlp.router.gate.weight",
            "mlp.router.expert_bias": "mlp.expert_bias",
        },
        exact=("mlp.expert_bias",),
    ),
)
