"""Qwen3-MoE: Qwen3 with routed experts."""

from typing import Any

from megatron_ext.text.convert.families import llama, qwen2_moe, qwen3
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.table import Table


def read(settings: Settings) -> Fields:
    # transformers writes num_experts, but its configuration object says num_local_experts.
    experts = settings["num_experts"] or settings["num_local_experts"]
    return qwen3.read(settings) | qwen2_moe.read_experts(settings) | {"num_experts": experts}


def write(gpt: Gpt) -> dict[str, Any]:
    own = qwen2_moe.write_experts(gpt) | {"num_experts": gpt.moe.num_experts}
    return qwen3.write(gpt) | own


def weights(gpt: Gpt, vocab_size: int) -> Table:
    layer = {**llama.norms(), **llama.attention(gpt), **qwen2_moe.routed_experts()}
    return Table(llama.outer(vocab_size), layer)


FAMILY = llama.relative(
    {"qk_layernorm": True},
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    same={ours: key for ours, key in qwen2_moe.SAME.items() if ours != "num_experts"},
    read=read,
    write=write,
    weights=weights,
)
