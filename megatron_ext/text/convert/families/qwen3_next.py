"""Qwen3-Next: gated DeltaNet in most layers, attention with gates in the others, experts."""

from collections.abc import Iterable
from typing import Any

from megatron_ext.config.layers import ATTENTION, EXPERTS, mixer_of, mlp_of
from megatron_ext.text.convert.delta_rows import convolution, grouped_projection
from megatron_ext.text.convert.entries import Rotary, Translated, copies
from megatron_ext.text.convert.families import llama, qwen2_moe, qwen3, qwen3_moe
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.weights import Given, separate_gated_qkv

DELTA = "G"
LINEAR, FULL = "linear_attention", "full_attention"
DEPTHS = "num_nextn_predict_layers"
REFUSED_TYPES = f"`layer_types` other than {LINEAR}, {FULL}"


def mixers(settings: Settings, recurrent: str) -> list[str]:
    """Return the letter of the mixer of each layer; ``recurrent`` is that of linear attention."""
    names = {LINEAR: recurrent, FULL: ATTENTION}
    types = settings["layer_types"]
    unknown = [kind for kind in types if kind not in names]
    if unknown:
        settings.refuse("layer_types", unknown[0], f"use a model with {LINEAR} and {FULL} alone")
    return [names[kind] for kind in types]


def read_interval(settings: Settings) -> None:
    """Read ``full_attention_interval``; it has no effect if ``layer_types`` says other layers."""
    step = settings.given.get("full_attention_interval")
    types = settings["layer_types"]
    if step is None or types == [LINEAR if n % step else FULL for n in range(1, len(types) + 1)]:
        settings.read.add("full_attention_interval")


def layer_types(gpt: Gpt) -> list[str]:
    """Return the entry ``layer_types``."""
    return [FULL if mixer_of(kind) == ATTENTION else LINEAR for kind in gpt.kinds]


def with_depths(settings: Settings, kinds: Iterable[str], key: str, depth: str) -> Fields:
    """Return the fields of a decoder with layers of these kinds, and of its MTP depth, if any.

    Args:
        key: name of the entry with the number of depths.
        depth: the kind of the layer of a depth.
    """
    count = settings[key] or 0
    if count > 1:
        settings.refuse(key, count, "use a model with one, whose tensors have no number")
    return {"hybrid_layer_pattern": "".join(kinds) + f"/{depth}" * count}


def _read_layers(settings: Settings) -> Fields:
    read_interval(settings)
    step = settings["decoder_sparse_step"] or 1
    dense = settings["mlp_only_layers"] or []
    kinds = [
        mixer + (EXPERTS if layer not in dense and (layer + 1) % step == 0 else "-")
        for layer, mixer in enumerate(mixers(settings, DELTA))
    ]
    return with_depths(settings, kinds, DEPTHS, f"{ATTENTION}{EXPERTS}")


def _write_layers(gpt: Gpt) -> dict[str, Any]:
    dense = [layer for layer, kind in enumerate(gpt.kinds) if mlp_of(kind) != EXPERTS]
    return {
        "layer_types": layer_types(gpt),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        DEPTHS: gpt.model.mtp_num_layers or 0,
    }


LAYERS = Translated(
    ("hybrid_layer_pattern", "moe_layer_freq", "mtp_num_layers"),
    ("layer_types", "full_attention_interval", "decoder_sparse_step", "mlp_only_layers", DEPTHS),
    _read_layers,
    _write_layers,
    (REFUSED_TYPES,),
)
"""The mixer of each layer, and whether it has experts."""
SIZES = copies(
    {
        name: name
        for name in (
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
        )
    }
)
FIXED: Fields = {
    "apply_layernorm_1p": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
}
"""Fields of all models with these layers."""
GATED: Given = {
    "self_attention.linear_qkv.{kind}": separate_gated_qkv(
        "self_attn.q_proj.{kind}", "self_attn.k_proj.{kind}", "self_attn.v_proj.{kind}"
    ),
}
DELTA_NET: Given = {
    "self_attention.in_proj.weight": grouped_projection(
        "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"
    ),
    "self_attention.conv_weight": convolution("linear_attn.conv1d.weight"),
    "self_attention.dt_bias": "linear_attn.dt_bias",
    "self_attention.A_log": "linear_attn.A_log",
    "self_attention.out_norm.weight": "linear_attn.norm.weight",
    "self_attention.out_proj.weight": "linear_attn.out_proj.weight",
}
"""The sources of gated DeltaNet."""
SHARED: Given = {
    **qwen2_moe.shared_experts("mlp.shared_expert"),
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
"""The sources of the shared expert and its gate."""
WEIGHTS = llama.WEIGHTS.but(
    layer={**GATED, **qwen2_moe.EXPERTS, **SHARED, **DELTA_NET},
    depth={
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "final_layernorm.weight": "mtp.norm.weight",
    },
    depths="mtp.layers.{layer}",
)
_ENTRIES = (LAYERS, *SIZES, Rotary(default_share=0.25, share_always=True), llama.ATTENTION_BIAS)
DENSE = qwen3.FAMILY.but(
    model_type="qwen3",
    architecture="",
    says="",
    entries=_ENTRIES,
    fixed=FIXED,
    weights=WEIGHTS,
)
"""A decoder of such layers without experts."""
FAMILY = qwen3_moe.FAMILY.but(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    says="gated DeltaNet between attention with gates, experts, a shared expert behind a gate",
    entries=(
        *_ENTRIES,
        *copies({"moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"}),
    ),
    fixed={**FIXED, "moe_shared_expert_gate": True},
    weights=WEIGHTS,
)
