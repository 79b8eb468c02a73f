"""DeepSeek-V2 and V2-Lite: latent attention, and experts scored by softmax without a bias."""

from typing import Any

from megatron_ext.text.convert.families import deepseek_v3, llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.table import Table

_GROUPS = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores")


def read(settings: Settings) -> Fields:
    fields = deepseek_v3.read_latent(settings) | deepseek_v3.read_experts(settings, ranking=1)
    if settings["topk_method"] not in ("greedy", "group_limited_greedy"):
        settings.refuse("topk_method")
    if settings["topk_method"] != "greedy":
        return fields
    return fields | dict.fromkeys(_GROUPS)


def write(gpt: Gpt) -> dict[str, Any]:
    grouped = gpt.moe.moe_router_num_groups is not None
    own = {
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    }
    return deepseek_v3.write_latent(gpt) | deepseek_v3.write_experts(gpt) | own


def weights(gpt: Gpt, vocab_size: int) -> Table:
    return Table(llama.outer(vocab_size), deepseek_v3.decoder_layer())


FAMILY = llama.relative(
    {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "moe_router_pre_softmax": True,
        **deepseek_v3.ROUTER,
    },
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    same=deepseek_v3.SAME,
    only=deepseek_v3.ONLY | {"norm_topk_prob": False, "mlp_bias": False},
    read=read,
    write=write,
    weights=weights,
)
