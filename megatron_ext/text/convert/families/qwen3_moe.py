"""Qwen3-MoE: Qwen3 with routed experts."""

from megatron_ext.text.convert.entries import Translated
from megatron_ext.text.convert.families import llama, qwen2_moe, qwen3
from megatron_ext.text.convert.family import Fields, Settings


def _read_number(settings: Settings) -> Fields:
    # transformers writes num_experts, but its configuration object says num_local_experts.
    return {"num_experts": settings["num_experts"] or settings["num_local_experts"]}


NUMBER = Translated(
    ("num_experts",),
    ("num_experts", "num_local_experts"),
    _read_number,
    lambda gpt: {"num_experts": gpt.moe.num_experts},
)
FAMILY = qwen3.FAMILY.but(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    says="experts, dense layers between",
    entries=(*qwen2_moe.ROUTER, NUMBER),
    weights=llama.WEIGHTS.but(layer=qwen2_moe.EXPERTS),
)
