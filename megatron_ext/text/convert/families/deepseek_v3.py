"""DeepSeek-V3 and R1: latent attention, grouped experts with a bias, multi-token prediction.

transformers and megatron-core both rotate neighbouring pairs of channels of queries and keys, so
these weights need no permutation. Hugging Face's files number the MTP depths as further layers
after the last decoder layer; each of them has a copy of the embedding and the head.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from megatron_ext.text.convert.entries import Translated, Writes, copies, list_flag
from megatron_ext.text.convert.families import llama, qwen2_moe
from megatron_ext.text.convert.family import Entry, Fields, Gpt, Settings
from megatron_ext.text.convert.weights import Weights

BIAS = "e_score_correction_bias"
ROUTER = {"moe_router_dtype": "fp32"}
"""Our configuration fields for a router that computes in float32 whatever the model's dtype."""
BIASED_ROUTER = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    **ROUTER,
}
"""Our configuration fields for a router with sigmoid scores and biases that balance the experts."""
_YARN = ("beta_fast", "beta_slow")
_LATENT_EPSILON = 1e-6
"""The epsilon that transformers gives to the norms of latent vectors in any case."""


def _read_positions(settings: Settings) -> Fields:
    given = dict(settings["rope_parameters"] or settings["rope_scaling"] or {})
    epsilon = settings["rms_norm_eps"]
    fields: Fields = {
        "norm_epsilon": epsilon,
        "latent_norm_epsilon": None if epsilon == _LATENT_EPSILON else _LATENT_EPSILON,
        "rotary_base": float(given.pop("rope_theta", settings["rope_theta"])),
        "rope_type": "rope",
    }
    share = given.pop("partial_rotary_factor", settings["partial_rotary_factor"])
    if share not in (None, 1.0):
        settings.refuse("partial_rotary_factor", share)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if kind == "default":
        return fields
    whole_growth = given.pop("mscale_all_dim", None) or 0.0
    growth = given.pop("mscale", None) or 0.0
    # transformers uses `mscale` and `mscale_all_dim` only if both are given.
    is_supported = kind == "yarn" and (growth or not whole_growth)
    scaling = {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(given.pop("factor", 1.0)),
        "original_max_position_embeddings": given.pop("original_max_position_embeddings", None),
        "mscale": float(growth if whole_growth else 1.0),
        "mscale_all_dim": float(whole_growth),
        **{name: float(given.pop(name)) for name in _YARN if given.get(name) is not None},
    }
    if not is_supported or any(value is not None for value in given.values()):
        settings.refuse("rope_parameters", settings["rope_parameters"] or settings["rope_scaling"])
    return fields | scaling


def _write_positions(gpt: Gpt) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if gpt.latent.rope_type == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": gpt.latent.rotary_scaling_factor,
            "original_max_position_embeddings": gpt.latent.original_max_position_embeddings,
            "mscale": gpt.latent.mscale,
            "mscale_all_dim": gpt.latent.mscale_all_dim,
            **{name: getattr(gpt.latent, name) for name in _YARN},
        }
    return {
        "rms_norm_eps": gpt.model.norm_epsilon,
        "rope_theta": gpt.positions.rotary_base,
        "rope_scaling": scaling,
    }


POSITIONS = Translated(
    (
        "norm_epsilon",
        "latent_norm_epsilon",
        "rotary_base",
        "rope_type",
        "rotary_scaling_factor",
        "original_max_position_embeddings",
        "mscale",
        "mscale_all_dim",
        *_YARN,
    ),
    ("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    _read_positions,
    _write_positions,
    ("`rope_scaling` other than yarn",),
)
"""The positions of latent attention, scaled by YaRN or not."""
HEADS = Translated(
    ("num_attention_heads", "group_query_attention", "num_query_groups", "kv_channels"),
    ("num_attention_heads", "num_key_value_heads", "head_dim"),
    lambda settings: {"num_attention_heads": settings["num_attention_heads"]},
    lambda gpt: dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads"), gpt.model.num_attention_heads
    ),
)
"""The heads of latent attention, of which each has a key."""
LATENT = (
    *copies(
        {
            "kv_lora_rank": "kv_lora_rank",
            "q_lora_rank": "q_lora_rank",
            "qk_head_dim": "qk_nope_head_dim",
            "qk_pos_emb_head_dim": "qk_rope_head_dim",
            "v_head_dim": "v_head_dim",
        }
    ),
    HEADS,
    POSITIONS,
)
"""The entries of latent attention."""


def _read_first(settings: Settings) -> Fields:
    dense = settings["first_k_dense_replace"] or 0
    return layers_with_experts(layer >= dense for layer in range(settings["num_hidden_layers"]))


def _write_first(gpt: Gpt) -> dict[str, Any]:
    holds = gpt.moe.expert_layers(gpt.model.num_layers or 0)
    return {"first_k_dense_replace": holds.index(True) if any(holds) else len(holds)}


def layers_with_experts(holds: Iterable[bool]) -> Fields:
    """Return our field of the layers that have experts, given whether each of them has some."""
    layers = [int(has) for has in holds]
    return {"moe_layer_freq": "1" if all(layers) else list_flag(layers)}


FIRST_DENSE = Translated(("moe_layer_freq",), ("first_k_dense_replace",), _read_first, _write_first)
"""Which layers have experts: all but the first ones, of which there are so many."""


def _read_words(settings: Settings) -> Fields:
    # Where no words are given, transformers derives them from the number of first dense layers.
    settings.read.add("first_k_dense_replace")
    return layers_with_experts(kind == "sparse" for kind in settings["mlp_layer_types"])


def _read_types(settings: Settings) -> Fields:
    dense = settings["first_k_dense_replace"]
    if dense is not None and settings["mlp_layer_types"][:dense] != ["dense"] * dense:
        settings.refuse("first_k_dense_replace", advice="give `mlp_layer_types`, which decides")
    return _read_words(settings)


def _write_types(gpt: Gpt) -> dict[str, Any]:
    holds = gpt.moe.expert_layers(gpt.model.num_layers or 0)
    names = {False: "dense", True: "sparse"}
    return {"mlp_layer_types": [names[has] for has in holds]}


MLP_TYPES = Translated(
    ("moe_layer_freq",), ("mlp_layer_types", "first_k_dense_replace"), _read_types, _write_types
)
"""Which layers have experts, one word for each layer.

transformers does not read the number of first dense layers, which must agree.
"""
MLP_WORDS = dataclasses.replace(MLP_TYPES, reader=_read_words)
"""The same in families where the words count, whatever the number of first dense layers is."""


def widths(shared: str) -> Entry:
    """Return the entry of the widths of experts; ``shared`` names the number of shared experts.

    Several shared experts are one expert here, as wide as all of them.
    """

    def read(settings: Settings) -> Fields:
        width = settings["moe_intermediate_size"]
        count = settings[shared] or 0
        return {
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": count * width or None,
        }

    def write(gpt: Gpt) -> dict[str, Any]:
        width = gpt.moe.moe_ffn_hidden_size or gpt.model.ffn_hidden_size or 1
        together = gpt.moe.moe_shared_expert_intermediate_size or 0
        return {"moe_intermediate_size": width, shared: together // width}

    fields = ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    return Translated(fields, ("moe_intermediate_size", shared), read, write)


def scaled(key: str) -> Entry:
    """Return the entry ``key``, the factor on the weights of a token's experts."""

    def read(settings: Settings) -> Fields:
        value = settings[key]
        scale = 1.0 if value is None else float(value)
        if scale <= 0:
            settings.refuse(key, value, "use a model with a positive one")
        return {"moe_router_topk_scaling_factor": scale if scale != 1 else None}

    return Translated(
        ("moe_router_topk_scaling_factor",),
        (key,),
        read,
        lambda gpt: {key: gpt.moe.moe_router_topk_scaling_factor or 1.0},
    )


def groups(
    ranking: int, *, number: str = "n_group", per_token: str = "num_experts_per_tok"
) -> Entry:
    """Return the entries of groups of experts.

    Args:
        ranking: how many of a group's best expert scores are summed to rank the group.
        number, per_token: names of the entries with the numbers of groups and of a token's experts.
    """

    def read(settings: Settings) -> Fields:
        count = settings[number] or 1
        chosen = settings["topk_group"] or 1
        usual = count == 1 or settings[per_token] // chosen == ranking
        return {
            "moe_router_num_groups": count if count > 1 else None,
            "moe_router_group_topk": chosen if count > 1 else None,
            "moe_router_group_scores": None if usual else ranking,
        }

    return Translated(
        ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores"),
        (number, "topk_group"),
        read,
        lambda gpt: {
            number: gpt.moe.moe_router_num_groups or 1,
            "topk_group": gpt.moe.moe_router_group_topk or 1,
        },
    )


def experts(
    ranking: int,
    *,
    number: str = "n_routed_experts",
    shared: str = "n_shared_experts",
    layers: Entry = FIRST_DENSE,
) -> tuple[Entry, ...]:
    """Return the entries of shared and routed experts, and of the layers that have them.

    Args:
        ranking: how many of a group's best expert scores are summed to rank the group.
        number, shared: names of the entries with the numbers of routed and of shared experts.
        layers: the entry that says which layers have experts.
    """
    return (
        *copies({"num_experts": number, "moe_router_topk": "num_experts_per_tok"}),
        layers,
        widths(shared),
        scaled("routed_scaling_factor"),
        groups(ranking),
    )


DEPTHS = Translated(
    ("mtp_num_layers",),
    ("num_nextn_predict_layers",),
    lambda settings: {"mtp_num_layers": settings["num_nextn_predict_layers"] or None},
    lambda gpt: {"num_nextn_predict_layers": gpt.model.mtp_num_layers or 0},
)
"""The number of depths of multi-token prediction."""
LATENT_WEIGHTS = llama.WEIGHTS.but(
    without=("self_attention.",),
    layer={
        "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
        "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
        "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
        "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
        "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        **qwen2_moe.EXPERTS,
        **qwen2_moe.shared_experts("mlp.shared_experts"),
    },
)
"""The weights of latent attention and experts, without a bias of the router."""


def with_depths(weights: Weights) -> Weights:
    """Return ``weights`` with a router's bias and any number of MTP depths."""
    return weights.but(
        layer={"mlp.router.expert_bias": f"mlp.gate.{BIAS}"},
        depth={
            "enorm.weight": "enorm.weight",
            "hnorm.weight": "hnorm.weight",
            "eh_proj.weight": "eh_proj.weight",
            "final_layernorm.weight": "shared_head.norm.weight",
        },
        depth_copies={
            "embed_tokens.weight": "model.embed_tokens.weight",
            "shared_head.head.weight": "lm_head.weight",
        },
        exact=(BIAS,),
    )


FAMILY = llama.BASE.but(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    says="latent attention, groups of experts, multi-token prediction, fp8 weights with scales",
    entries=(
        *LATENT,
        *experts(ranking=2),
        DEPTHS,
        Writes("scoring_func", "sigmoid"),
        Writes("topk_method", "noaux_tc"),
    ),
    fixed={"multi_latent_attention": True, "qk_layernorm": True, **BIASED_ROUTER},
    only={"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True},
    weights=with_depths(LATENT_WEIGHTS),
)
