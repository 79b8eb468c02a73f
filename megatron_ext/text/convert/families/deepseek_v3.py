"""DeepSeek-V3 and R1: latent attention, grouped experts with a bias, multi-token prediction.

transformers and megatron-core both rotate neighbouring pairs of channels of queries and keys, so
these weights need no permutation. Hugging Face's files number the MTP depths as further layers
after the last decoder layer; each of them has a copy of the embedding and the head.
"""

from typing import Any

from megatron_ext.text.convert.entries import Translated, Writes, copies, list_flag
from megatron_ext.text.convert.families import llama, qwen2_moe
from megatron_ext.text.convert.family import Fields, Gpt, Settings
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


def _read_positions(settings: Settings) -> Fields:
    if settings["rms_norm_eps"] != 1e-6:
        # In transformers the norms of the latent vectors have this epsilon in any case, but ours
        # have the epsilon of all norms.
        settings.refuse("rms_norm_eps", advice="use a model with 1e-06")
    given = dict(settings["rope_parameters"] or settings["rope_scaling"] or {})
    fields: Fields = {
        "norm_epsilon": settings["rms_norm_eps"],
        "rotary_base": float(given.pop("rope_theta", settings["rope_theta"])),
        "rope_type": "rope",
    }
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
    ("`rms_norm_eps` other than 1e-06", "`rope_scaling` other than yarn"),
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


def experts(ranking: int) -> tuple[Any, ...]:
    """Return the entries of shared and routed experts, and of the layers that have them.

    Args:
        ranking: how many of a group's best expert scores are summed to rank the group.
    """

    def read(settings: Settings) -> Fields:
        dense = settings["first_k_dense_replace"] or 0
        holds = [int(layer >= dense) for layer in range(settings["num_hidden_layers"])]
        shared = settings["n_shared_experts"] or 0
        width = settings["moe_intermediate_size"]
        groups = settings["n_group"] or 1
        chosen = settings["topk_group"] or 1
        usual = groups == 1 or settings["num_experts_per_tok"] // chosen == ranking
        scale = float(settings["routed_scaling_factor"] or 1.0)
        return {
            "moe_layer_freq": "1" if all(holds) else list_flag(holds),
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": shared * width or None,
            "moe_router_num_groups": groups if groups > 1 else None,
            "moe_router_group_topk": chosen if groups > 1 else None,
            "moe_router_group_scores": None if usual else ranking,
            "moe_router_topk_scaling_factor": scale if scale != 1 else None,
        }

    return (
        *copies({"num_experts": "n_routed_experts", "moe_router_topk": "num_experts_per_tok"}),
        Translated(
            (
                "moe_layer_freq",
                "moe_ffn_hidden_size",
                "moe_shared_expert_intermediate_size",
                "moe_router_num_groups",
                "moe_router_group_topk",
                "moe_router_group_scores",
                "moe_router_topk_scaling_factor",
            ),
            (
                "first_k_dense_replace",
                "moe_intermediate_size",
                "n_shared_experts",
                "n_group",
                "topk_group",
                "routed_scaling_factor",
            ),
            read,
            _write_experts,
        ),
    )


def _write_experts(gpt: Gpt) -> dict[str, Any]:
    holds = gpt.moe.expert_layers(gpt.model.num_layers or 0)
    width = gpt.moe.moe_ffn_hidden_size or gpt.model.ffn_hidden_size or 1
    return {
        "first_k_dense_replace": holds.index(True) if any(holds) else len(holds),
        "moe_intermediate_size": width,
        "n_shared_experts": (gpt.moe.moe_shared_expert_intermediate_size or 0) // width,
        "n_group": gpt.moe.moe_router_num_groups or 1,
        "topk_group": gpt.moe.moe_router_group_topk or 1,
        "routed_scaling_factor": gpt.moe.moe_router_topk_scaling_factor or 1.0,
    }


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
