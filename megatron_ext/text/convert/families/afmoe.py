"""Trinity (AFMoE): gates on attention's outputs, norms before and after, sigmoid scores."""

from typing import Any

from megatron_ext.text.convert.entries import RotaryInWindows, Translated, copies
from megatron_ext.text.convert.families import deepseek_v3, llama, qwen2_moe
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.weights import qkv_and_gate

_DENSE = "num_dense_layers"


def _read_layers(settings: Settings) -> Fields:
    dense = settings[_DENSE] or 0
    count = settings["num_hidden_layers"]
    return deepseek_v3.layers_with_experts(layer >= dense for layer in range(count))


def _write_layers(gpt: Gpt) -> dict[str, Any]:
    holds = gpt.moe.expert_layers(gpt.model.num_layers or 0)
    return {_DENSE: holds.index(True) if any(holds) else len(holds)}


def _read_factor(settings: Settings) -> Fields:
    scales = settings["mup_enabled"]
    return {"embedding_multiplier": float(settings["hidden_size"]) ** 0.5 if scales else 1.0}


FAMILY = llama.BASE.but(
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    says="gates on attention's outputs, norms before and after, rotary positions only in layers "
    "with a window, sigmoid scores, bias of experts",
    entries=(
        *copies({"num_experts": "num_experts", "moe_router_topk": "num_experts_per_tok"}),
        Translated(("moe_layer_freq",), (_DENSE,), _read_layers, _write_layers),
        deepseek_v3.widths("num_shared_experts"),
        deepseek_v3.scaled("route_scale"),
        RotaryInWindows(rotates_without=False, also=("global_attn_every_n_layers",)),
        Translated(
            ("embedding_multiplier",),
            ("mup_enabled",),
            _read_factor,
            lambda gpt: {"mup_enabled": gpt.model.embedding_multiplier != 1.0},
        ),
    ),
    fixed={
        "qk_layernorm": True,
        "attention_output_gate": True,
        "sandwich_norm": True,
        **deepseek_v3.BIASED_ROUTER,
    },
    only={"attention_bias": False},
    weights=llama.WEIGHTS.but(
        layer={
            "self_attention.linear_qkv.weight": qkv_and_gate(
                "self_attn.q_proj.weight",
                "self_attn.gate_proj.weight",
                "self_attn.k_proj.weight",
                "self_attn.v_proj.weight",
            ),
            "post_self_attn_layernorm.weight": "post_attention_layernorm.weight",
            "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
            "pre_mlp_layernorm.weight": "pre_mlp_layernorm.weight",
            "post_mlp_layernorm.weight": "post_mlp_layernorm.weight",
            **qwen2_moe.EXPERTS,
            **qwen2_moe.shared_experts("mlp.shared_experts"),
            "mlp.router.weight": "mlp.router.gate.weight",
            "mlp.router.expert_bias": "mlp.expert_bias",
        },
        exact=("mlp.expert_bias",),
    ),
)
