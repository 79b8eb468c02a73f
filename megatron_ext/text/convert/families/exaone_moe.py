"""K-EXAONE: rotary positions in layers with a window only, and DeepSeek-V3's experts."""

from megatron_ext.text.convert.entries import RotaryInWindows
from megatron_ext.text.convert.families import deepseek_v3, llama, qwen2_moe

FAMILY = llama.BASE.but(
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    says="rotary positions only in layers with a window, sigmoid scores, bias of experts",
    entries=(
        *deepseek_v3.experts(
            ranking=2,
            number="num_experts",
            shared="num_shared_experts",
            layers=deepseek_v3.MLP_WORDS,
        ),
        RotaryInWindows(rotates_without=False, also=("sliding_window_pattern",)),
    ),
    fixed={"qk_layernorm": True, **deepseek_v3.BIASED_ROUTER},
    only={"norm_topk_prob": True},
    weights=llama.WEIGHTS.but(
        layer={
            **qwen2_moe.EXPERTS,
            **qwen2_moe.shared_experts("mlp.shared_experts"),
            "mlp.router.expert_bias": f"mlp.{deepseek_v3.BIAS}",
        },
        exact=(deepseek_v3.BIAS,),
        unused=("mtp.",),
    ),
)
