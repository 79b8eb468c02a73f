"""Hunyuan with experts (A13B): Hunyuan's attention, and a shared expert of the same width."""

from typing import Any

from megatron_ext.text.convert.entries import Requires, Translated
from megatron_ext.text.convert.families import hunyuan_v1_dense, llama, qwen2_moe
from megatron_ext.text.convert.family import Fields, Gpt, Settings


def _same(settings: Settings, key: str, default: int | None = None) -> Any:
    """Return an entry that has one number, or the same for each layer; refuse other lists."""
    value = settings[key]
    if isinstance(value, list):
        if len(set(value)) != 1:
            settings.refuse(key, advice="use a model whose layers are alike")
        value = value[0]
    return default if value is None else value


def _read(settings: Settings) -> Fields:
    width = settings["intermediate_size"]
    own = _same(settings, "moe_intermediate_size", width)
    if own != width:
        settings.refuse("moe_intermediate_size", advice=f"use a model with {width}")
    if _same(settings, "num_shared_expert", 1) != 1:
        settings.refuse("num_shared_expert", advice="use a model with 1")
    return {
        "num_experts": settings["num_experts"],
        "moe_router_topk": _same(settings, "moe_topk"),
        "ffn_hidden_size": width,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width,
    }


def _write(gpt: Gpt) -> dict[str, Any]:
    """Write the width of the shared expert; experts of another width make another model."""
    return {
        "num_experts": gpt.moe.num_experts,
        "moe_topk": gpt.moe.moe_router_topk,
        "intermediate_size": gpt.moe.moe_ffn_hidden_size or gpt.model.ffn_hidden_size,
    }


FAMILY = hunyuan_v1_dense.FAMILY.but(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    says="norms of queries and keys after their rotation, experts and a shared expert",
    entries=(
        Translated(
            (
                "num_experts",
                "moe_router_topk",
                "ffn_hidden_size",
                "moe_ffn_hidden_size",
                "moe_shared_expert_intermediate_size",
            ),
            (
                "num_experts",
                "moe_topk",
                "intermediate_size",
                "moe_intermediate_size",
                "num_shared_expert",
            ),
            _read,
            _write,
            ("layers that differ in `moe_topk` or `moe_intermediate_size`",),
        ),
        Requires("use_cla", False),
        Requires("use_qk_norm", True),
        Requires("moe_layer_num_skipped", 0),
        Requires("norm_topk_prob", True),
    ),
    fixed={"moe_router_pre_softmax": False, "moe_router_dtype": "fp32"},
    weights=llama.WEIGHTS.but(
        layer={
            **hunyuan_v1_dense.NORMS,
            **qwen2_moe.EXPERTS,
            **qwen2_moe.shared_experts("mlp.shared_mlp"),
            "mlp.router.weight": "mlp.gate.wg.weight",
        }
    ),
)
