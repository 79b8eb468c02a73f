"""Granite 4: Mamba-2 in most layers, Granite's factors, experts beside a shared one or none."""

from __future__ import annotations

from typing import Any

from megatron_ext.config.layers import ATTENTION, DENSE, EXPERTS, mixer_of
from megatron_ext.text.convert.entries import Choice, Translated
from megatron_ext.text.convert.families import granite, granitemoe, llama
from megatron_ext.text.convert.families.bamba import MAMBA, SIZES
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.mamba_rows import mamba
from megatron_ext.text.convert.weights import Weights, whole

NAMES = {"linear_attention": MAMBA, "full_attention": ATTENTION}
"""The letter of our mixer, by transformers' name of its kind in ``layer_types``."""
_SHARED = "moe_shared_expert_intermediate_size"


def _read_layers(settings: Settings) -> Fields:
    """Read the layers; without experts the shared one is the MLP of a layer."""
    settings.read.update(("num_hidden_layers", "num_experts_per_tok"))
    types = settings["layer_types"]
    unknown = [kind for kind in types if kind not in NAMES]
    if unknown:
        settings.refuse("layer_types", unknown[0], f"use a model with {' and '.join(NAMES)} alone")
    width = settings["intermediate_size"]
    shared = settings["shared_intermediate_size"]
    count = settings["num_local_experts"] or 0
    letter = EXPERTS if count else DENSE
    fields: Fields = {"hybrid_layer_pattern": "".join(NAMES[kind] + letter for kind in types)}
    if not count:
        return {**fields, "ffn_hidden_size": shared}
    return {
        **fields,
        "ffn_hidden_size": width,
        "moe_ffn_hidden_size": width,
        _SHARED: shared or None,
        "num_experts": count,
        "moe_router_topk": settings["num_experts_per_tok"],
        "moe_router_pre_softmax": False,
    }


def _write_layers(gpt: Gpt) -> dict[str, Any]:
    types = {letter: name for name, letter in NAMES.items()}
    width = gpt.model.ffn_hidden_size
    entries: dict[str, Any] = {
        "num_hidden_layers": len(gpt.kinds),
        "layer_types": [types.get(mixer_of(kind), mixer_of(kind)) for kind in gpt.kinds],
    }
    if gpt.moe.num_experts is None:
        return {**entries, "num_local_experts": 0, "shared_intermediate_size": width}
    return {
        **entries,
        "intermediate_size": gpt.moe.moe_ffn_hidden_size or width,
        "shared_intermediate_size": gpt.value(_SHARED) or 0,
        "num_local_experts": gpt.moe.num_experts,
        "num_experts_per_tok": gpt.moe.moe_router_topk,
    }


LAYERS = Translated(
    (
        "num_layers", "hybrid_layer_pattern", "moe_layer_freq", "ffn_hidden_size",
        "moe_ffn_hidden_size", _SHARED, "num_experts", "moe_router_topk", "moe_router_pre_softmax",
    ),
    (
        "num_hidden_layers", "layer_types", "intermediate_size", "shared_intermediate_size",
        "num_local_experts", "num_experts_per_tok",
    ),
    _read_layers,
    _write_layers,
    ("`layer_types` other than linear_attention, full_attention",),
)  # fmt: skip
"""The mixer of each layer, and its experts or its MLP."""
SPARSE = granitemoe.PLAIN.weights.but(layer=mamba("mamba"))
DENSE_WEIGHTS = llama.WEIGHTS.but(
    layer={
        **mamba("mamba"),
        "mlp.linear_fc1.weight": whole("shared_mlp.input_linear.weight"),
        "mlp.linear_fc2.weight": "shared_mlp.output_linear.weight",
    }
)


def weights_of(gpt: Gpt) -> Weights:
    """Return the tensors of a model with experts, or of one without."""
    return DENSE_WEIGHTS if gpt.moe.num_experts is None else SPARSE


FAMILY = granite.GRANITE.but(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    says="Mamba-2 in most layers, Granite's factors, experts beside a shared one or none",
    entries=(
        LAYERS,
        *SIZES,
        Choice(
            "position_embedding_type",
            {
                "rope": {"position_embedding_type": "rope"},
                None: {"position_embedding_type": "none"},
                "nope": {"position_embedding_type": "none"},
            },
        ),
    ),
    only={"mamba_proj_bias": False},
    without=("mlp_bias",),
    weights=SPARSE,
    weights_of=weights_of,
)
