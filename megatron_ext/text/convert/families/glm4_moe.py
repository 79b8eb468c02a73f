"""GLM-4.5 and 4.6: partly rotary attention with biases, and DeepSeek-V3's experts."""

from typing import Any

from megatron_ext.text.convert.families import deepseek_v3, llama, qwen2_moe
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.table import Table

SAME = llama.SAME | {
    "num_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}


def read(settings: Settings) -> Fields:
    if settings["norm_topk_prob"] is False:
        settings.refuse("norm_topk_prob", advice="use a model with true")
    own = {
        "qk_layernorm": bool(settings["use_qk_norm"]),
        "add_qkv_bias": bool(settings["attention_bias"]),
        "mtp_num_layers": settings["num_nextn_predict_layers"] or None,
    }
    return llama.read(settings) | deepseek_v3.read_experts(settings, ranking=2) | own


def write(gpt: Gpt) -> dict[str, Any]:
    own = {
        "partial_rotary_factor": gpt.positions.rotary_percent,
        "use_qk_norm": gpt.model.qk_layernorm,
        "attention_bias": gpt.model.add_qkv_bias,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": gpt.model.mtp_num_layers or 0,
    }
    return llama.write(gpt) | deepseek_v3.write_experts(gpt) | own


def weights(gpt: Gpt, vocab_size: int) -> Table:
    layer = {
        **llama.norms(),
        **llama.attention(gpt),
        **qwen2_moe.routed_experts(),
        **llama.gated_mlp("mlp.shared_experts", "mlp.shared_experts"),
    }
    return deepseek_v3.with_depths(gpt, vocab_size, layer)


FAMILY = llama.relative(
    deepseek_v3.BIASED_ROUTER,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    same=SAME,
    read=read,
    write=write,
    weights=weights,
)
