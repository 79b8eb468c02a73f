"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with routed experts and a shared expert behind a gate."""

from typing import Any

from megatron_ext.text.convert.entries import Copy, Switch, Translated, list_flag
from megatron_ext.text.convert.families import llama, qwen2
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.weights import Given, joined


def _read_layers(settings: Settings) -> Fields:
    step = settings["decoder_sparse_step"] or 1
    dense = settings["mlp_only_layers"] or []
    layers = range(settings["num_hidden_layers"])
    holds = [int(x not in dense and (x + 1) % step == 0) for x in layers]
    return {"moe_layer_freq": "1" if all(holds) else list_flag(holds)}


def _write_layers(gpt: Gpt) -> dict[str, Any]:
    holds = gpt.moe.expert_layers(gpt.model.num_layers or 0)
    dense = [layer for layer, experts in enumerate(holds) if not experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _write_width(gpt: Gpt) -> dict[str, Any]:
    return {"moe_intermediate_size": gpt.moe.moe_ffn_hidden_size or gpt.model.ffn_hidden_size}


LAYERS = Translated(
    ("moe_layer_freq",), ("decoder_sparse_step", "mlp_only_layers"), _read_layers, _write_layers
)
"""Which layers have experts."""
WIDTH = Translated(
    ("moe_ffn_hidden_size",),
    ("moe_intermediate_size",),
    lambda settings: {"moe_ffn_hidden_size": settings["moe_intermediate_size"]},
    _write_width,
)
"""The width of an expert; by default that of a dense MLP."""
ROUTER = (
    LAYERS,
    WIDTH,
    Copy("moe_router_topk", "num_experts_per_tok"),
    # Scores that are not renormalized come from a softmax over all experts, before the choice.
    Switch("norm_topk_prob", ("moe_router_pre_softmax",), negated=True),
)
EXPERTS: Given = {
    "mlp.experts.experts.linear_fc1.weight": joined(
        "mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"
    ),
    "mlp.experts.experts.linear_fc2.weight": "mlp.experts.{expert}.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""The sources of routed experts, each with tensors of its own, and of the router."""


def shared_experts(theirs: str) -> Given:
    """Return the sources of the shared expert, whose path within a layer is ``theirs``."""
    return {
        "mlp.shared_experts.linear_fc1.weight": joined(
            f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"
        ),
        "mlp.shared_experts.linear_fc2.weight": f"{theirs}.down_proj.weight",
    }


FAMILY = qwen2.FAMILY.but(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    says="experts, a shared expert behind a gate, dense layers between",
    entries=(
        *ROUTER,
        Copy("num_experts", "num_experts"),
        Copy("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
    ),
    fixed={"add_qkv_bias": True, "moe_shared_expert_gate": True},
    only={"qkv_bias": True},
    weights=llama.WEIGHTS.but(
        layer={
            **EXPERTS,
            **shared_experts("mlp.shared_expert"),
            "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
        }
    ),
)
