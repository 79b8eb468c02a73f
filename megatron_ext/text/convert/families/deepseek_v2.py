"""DeepSeek-V2 and V2-Lite: latent attention, and experts scored by softmax without a bias."""

from typing import Any

from megatron_ext.text.convert.entries import Translated, Writes
from megatron_ext.text.convert.families import deepseek_v3, llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings

_GROUPS = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores")
*_COUNT, _EXPERTS = deepseek_v3.experts(ranking=1)


def _read_experts(settings: Settings) -> Fields:
    fields: Fields = _EXPERTS.read(settings)
    if settings["topk_method"] not in ("greedy", "group_limited_greedy"):
        settings.refuse("topk_method")
    return fields if settings["topk_method"] != "greedy" else fields | dict.fromkeys(_GROUPS)


def _write_experts(gpt: Gpt) -> dict[str, Any]:
    grouped = gpt.moe.moe_router_num_groups is not None
    method = {"topk_method": "group_limited_greedy" if grouped else "greedy"}
    return {**_EXPERTS.write(gpt), **method}


EXPERTS = Translated(
    _EXPERTS.fields,
    (*_EXPERTS.keys, "topk_method"),
    _read_experts,
    _write_experts,
    ("`topk_method` other than greedy, group_limited_greedy",),
)
FAMILY = llama.BASE.but(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    says="latent attention, groups of experts",
    entries=(*deepseek_v3.LATENT, *_COUNT, EXPERTS, Writes("scoring_func", "softmax")),
    fixed={
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "moe_router_pre_softmax": True,
        **deepseek_v3.ROUTER,
    },
    only={"attention_bias": False, "norm_topk_prob": False, "mlp_bias": False},
    weights=deepseek_v3.LATENT_WEIGHTS,
)
