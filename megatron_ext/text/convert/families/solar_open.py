"""Solar Open: GLM-4.5 with experts in every layer, and without norms of queries and keys."""

from megatron_ext.text.convert.entries import Rotary, copies
from megatron_ext.text.convert.families import deepseek_v3, glm4_moe

FAMILY = glm4_moe.FAMILY.but(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    says="sigmoid scores, bias of experts, experts in every layer",
    entries=(
        *copies({"num_experts": "n_routed_experts", "moe_router_topk": "num_experts_per_tok"}),
        deepseek_v3.widths("n_shared_experts"),
        deepseek_v3.scaled("routed_scaling_factor"),
        deepseek_v3.groups(ranking=2),
        Rotary(),
    ),
    without=(
        "first_k_dense_replace",
        "intermediate_size",
        "use_qk_norm",
        "num_nextn_predict_layers",
    ),
    weights=glm4_moe.FAMILY.weights,
)
