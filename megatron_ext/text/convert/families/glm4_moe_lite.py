"""GLM-4.7-Flash: DeepSeek-V3's attention and experts, with dense layers named one by one."""

from megatron_ext.text.convert.families import deepseek_v3

FAMILY = deepseek_v3.FAMILY.but(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    says="latent attention, sigmoid scores, bias of experts, multi-token prediction",
    entries=deepseek_v3.experts(ranking=2, layers=deepseek_v3.MLP_TYPES),
    without=("scoring_func", "topk_method"),
    weights=deepseek_v3.FAMILY.weights,
)
