"""MiniMax-M2: partly rotary heads, norms over all heads, and experts with sigmoid scores."""

from typing import Any

from megatron_ext.text.convert.entries import Requires, Rotary, Translated
from megatron_ext.text.convert.families import deepseek_v3, llama, mixtral
from megatron_ext.text.convert.family import Fields, Settings

_ROTARY = Rotary()
_OTHERS = ("rotary_dim", "attn_type_list")


def _read_rotary(settings: Settings) -> Fields:
    """Read the positions; transformers derives the share that turns from ``rotary_dim``."""
    settings.read.add("rotary_dim")
    kinds = settings["attn_type_list"] or []
    if any(kind != 1 for kind in kinds):
        settings.refuse("attn_type_list", advice="use a model with softmax attention everywhere")
    return _ROTARY.read(settings)


ROTARY = Translated(
    _ROTARY.fields,
    (*_ROTARY.keys, *_OTHERS),
    _read_rotary,
    _ROTARY.write,
    ("`attn_type_list` other than 1",),
)
NEEDED: dict[str, Any] = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
}
"""Entries of published models that transformers does not read, and what they must say."""
FAMILY = llama.BASE.but(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    says="partly rotary heads, norms over all heads of queries and keys, bias of experts",
    entries=(
        *mixtral.ROUTER,
        mixtral.WIDTH,
        ROTARY,
        *(Requires(key, value) for key, value in NEEDED.items()),
    ),
    fixed={
        "qk_layernorm": True,
        "qk_layernorm_all_heads": True,
        **deepseek_v3.BIASED_ROUTER,
    },
    only={"router_jitter_noise": 0.0},
    weights=mixtral.FAMILY.weights.but(
        without=("self_attention.q_layernorm", "self_attention.k_layernorm"),
        layer={
            "self_attention.q_norm.weight": "self_attn.q_norm.weight",
            "self_attention.k_norm.weight": "self_attn.k_norm.weight",
            "mlp.router.expert_bias": f"block_sparse_moe.{deepseek_v3.BIAS}",
        },
        exact=(deepseek_v3.BIAS,),
    ),
)
