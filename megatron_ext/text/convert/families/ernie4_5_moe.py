"""ERNIE 4.5 with experts: softmax scores with a bias, and rotation of neighbouring channels."""

from typing import Any

from megatron_ext.text.convert.entries import Translated, copies
from megatron_ext.text.convert.families import deepseek_v3, llama, qwen2_moe
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.weights import whole

_FIRST, _LAST, _STEP = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"


def _read_layers(settings: Settings) -> Fields:
    count = settings["num_hidden_layers"]
    first, last, step = (settings[key] for key in (_FIRST, _LAST, _STEP))
    last = count - 1 if last == -1 else last
    return deepseek_v3.layers_with_experts(
        first <= layer <= last and (layer + 1) % step == 0 for layer in range(count)
    )


def _write_layers(gpt: Gpt) -> dict[str, Any]:
    """Write the first and the last layer with experts, and the distance between these layers.

    If distances differ, no values of the three entries fit, and the written ones describe another
    model, which the caller finds.
    """
    holds = gpt.moe.expert_layers(gpt.model.num_layers or 0)
    layers = [layer for layer, has in enumerate(holds) if has] or [len(holds), len(holds)]
    step = layers[1] - layers[0] if len(layers) > 1 else layers[0] + 1
    return {_FIRST: layers[0], _LAST: layers[-1], _STEP: step or 1}


FAMILY = llama.BASE.but(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    says="softmax scores with a bias for the choice, neighbouring channels rotated",
    entries=(
        *copies({"num_experts": "moe_num_experts", "moe_router_topk": "moe_k"}),
        Translated(("moe_layer_freq",), (_FIRST, _LAST, _STEP), _read_layers, _write_layers),
        deepseek_v3.widths("moe_num_shared_experts"),
    ),
    fixed={
        "attention_dropout": 0.0,
        "rotary_interleaved": True,
        "moe_router_pre_softmax": True,
        "moe_router_norm_topk_prob": True,
        "moe_router_enable_expert_bias": True,
        **deepseek_v3.ROUTER,
    },
    # The least sum by which the weights of a token's experts are divided.
    only={"use_bias": False, "moe_norm_min": 1e-12},
    weights=llama.WEIGHTS.but(
        layer={
            **qwen2_moe.EXPERTS,
            **qwen2_moe.shared_experts("mlp.shared_experts"),
            # The bias is stored as [1, e], as if it were that of one of several groups.
            "mlp.router.expert_bias": whole(f"mlp.moe_statics.{deepseek_v3.BIAS}", stacked=True),
        },
        exact=(deepseek_v3.BIAS, "mlp.gate.weight"),
        unused=("model.mtp_",),
    ),
)
