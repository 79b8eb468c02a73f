"""DeepSeek-V2 and V2-Lite: latent attention, and experts scored by softmax without a bias."""

from typing import Any

from megatron_ext.text.convert.entries import Translated, Writes
from megatron_ext.text.convert.families import deepseek_v3, llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings

*_EXPERTS, _GROUPS = deepseek_v3.experts(ranking=1)


def _read_groups(settings: Settings) -> Fields:
    if settings["topk_method"] not in ("greedy", "group_limited_greedy"):
        settings.refuse("topk_method")
    grouped: Fields = _GROUPS.read(settings)
    return grouped if settings["topk_method"] != "greedy" else dict.fromkeys(grouped)


def _write_groups(gpt: Gpt) -> dict[str, Any]:
    grouped = gpt.moe.moe_router_num_groups is not None
    method = {"topk_method": "group_limited_greedy" if grouped else "greedy"}
    return {**_GROUPS.write(gpt), **method}


GROUPS = Translated(
    tuple(_GROUPS.fields),
    (*_GROUPS.keys, "topk_method"),
    _read_groups,
    _write_groups,
    ("`topk_method` other than greedy, group_limited_greedy",),
)
FAMILY = llama.BASE.but(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    says="latent attention, groups of experts",
    entries=(*deepseek_v3.LATENT, *_EXPERTS, GROUPS, Writes("scoring_func", "softmax")),
    fixed={
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "moe_router_pre_softmax": True,
        **deepseek_v3.ROUTER,
    },
    only={"attention_bias": False, "norm_topk_prob": False, "mlp_bias": False},
    weights=deepseek_v3.LATENT_WEIGHTS,
)
