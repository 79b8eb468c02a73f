"""dots.llm1: Qwen3's attention and DeepSeek-V3's experts."""

from megatron_ext.text.convert.entries import Window
from megatron_ext.text.convert.families import deepseek_v3, llama, qwen2_moe

FAMILY = llama.BASE.but(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    says="norms of queries and keys, sigmoid scores, bias of experts, windows in some layers",
    entries=(
        *deepseek_v3.experts(ranking=2),
        llama.ATTENTION_BIAS,
        Window(types="always", also=("max_window_layers",)),
    ),
    fixed={"qk_layernorm": True, **deepseek_v3.BIASED_ROUTER},
    only={"norm_topk_prob": True},
    weights=llama.WEIGHTS.but(
        layer={
            **qwen2_moe.EXPERTS,
            **qwen2_moe.shared_experts("mlp.shared_experts"),
            "mlp.router.expert_bias": f"mlp.gate.{deepseek_v3.BIAS}",
        },
        exact=(deepseek_v3.BIAS,),
    ),
)
