"""GLM-4.5 and 4.6: partly rotary attention with biases, and DeepSeek-V3's experts."""

from megatron_ext.text.convert.entries import Rotary, Switch
from megatron_ext.text.convert.families import deepseek_v3, llama, qwen2_moe

FAMILY = llama.BASE.but(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    says="partly rotary heads, sigmoid scores, bias of experts",
    entries=(
        *deepseek_v3.experts(ranking=2),
        deepseek_v3.DEPTHS,
        Rotary(share_always=True),
        Switch("use_qk_norm", ("qk_layernorm",)),
        Switch("attention_bias", ("add_qkv_bias",)),
    ),
    fixed=deepseek_v3.BIASED_ROUTER,
    only={"norm_topk_prob": True},
    weights=deepseek_v3.with_depths(
        llama.WEIGHTS.but(
            layer={
                **qwen2_moe.EXPERTS,
                **qwen2_moe.shared_experts("mlp.shared_experts"),
            }
        )
    ),
)
