"""DeepSeek-V3 and R1: latent attention, grouped experts with a bias, multi-token prediction.

transformers and megatron-core both rotate neighbouring pairs of channels of queries and keys, so
these weights need no permutation. Hugging Face's files number the MTP depths as further layers
after the last decoder layer; each of them has a copy of the embedding and the head.
"""

from typing import Any

from megatron_ext.text.convert.families import llama, qwen2_moe
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.table import Parts, Table, whole

SAME = llama.SAME | {
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "num_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
ONLY = llama.ONLY | {"attention_bias": False}
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


def read_latent(settings: Settings) -> Fields:
    """Return the configuration fields of rotary positions, attention dropout and tied embeddings.

    They are read from the config.json of a model with latent attention. Raise a CheckpointError if
    our layers do not support the model's norm epsilon or position scaling.
    """
    if settings["rms_norm_eps"] != 1e-6:
        # In transformers the norms of the latent vectors have this epsilon in any case, but ours
        # have the epsilon of all norms.
        settings.refuse("rms_norm_eps", advice="use a model with 1e-06")
    given = dict(settings["rope_parameters"] or settings["rope_scaling"] or {})
    fields: Fields = {
        "rotary_base": float(given.pop("rope_theta", settings["rope_theta"])),
        "rope_type": "rope",
        "untie_embeddings_and_output_weights": not settings["tie_word_embeddings"],
        "attention_dropout": float(settings["attention_dropout"] or 0.0),
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


def write_latent(gpt: Gpt) -> dict[str, Any]:
    """Return the entries of config.json for positions, tied embeddings and key-value heads.

    They describe ``gpt``, a model with latent attention.
    """
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
        "num_key_value_heads": gpt.model.num_attention_heads,
        "rope_theta": gpt.positions.rotary_base,
        "rope_scaling": scaling,
        "tie_word_embeddings": not gpt.model.untie_embeddings_and_output_weights,
    }


def read_experts(settings: Settings, ranking: int) -> Fields:
    """Return the configuration fields of shared experts, expert groups and layers with experts.

    Args:
        ranking: how many of a group's best expert scores are summed to rank the group.
    """
    dense = settings["first_k_dense_replace"] or 0
    layers = settings["num_hidden_layers"]
    holds = [int(layer >= dense) for layer in range(layers)]
    shared = settings["n_shared_experts"] or 0
    groups = settings["n_group"] or 1
    chosen = settings["topk_group"] or 1
    usual = groups == 1 or settings["num_experts_per_tok"] // chosen == ranking
    scale = float(settings["routed_scaling_factor"] or 1.0)
    return {
        "moe_layer_freq": "1" if all(holds) else llama.list_flag(holds),
        "moe_shared_expert_intermediate_size": shared * settings["moe_intermediate_size"] or None,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": chosen if groups > 1 else None,
        "moe_router_group_scores": None if usual else ranking,
        "moe_router_topk_scaling_factor": scale if scale != 1 else None,
    }


def write_experts(gpt: Gpt) -> dict[str, Any]:
    """Return the entries of config.json that describe the experts of ``gpt``."""
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


def read(settings: Settings) -> Fields:
    if settings["norm_topk_prob"] is False or settings["rope_interleave"] is False:
        key = "norm_topk_prob" if settings["norm_topk_prob"] is False else "rope_interleave"
        settings.refuse(key, advice="use a model with true")
    depths = {"mtp_num_layers": settings["num_nextn_predict_layers"] or None}
    return read_latent(settings) | read_experts(settings, ranking=2) | depths


def write(gpt: Gpt) -> dict[str, Any]:
    own = {
        "norm_topk_prob": True,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": gpt.model.mtp_num_layers or 0,
    }
    return write_latent(gpt) | write_experts(gpt) | own


def latent_attention() -> dict[str, Parts]:
    """Return, by our name, which Hugging Face tensor holds each weight of latent attention.

    The result covers queries both with and without a latent vector.
    """
    names = {
        "linear_q_proj.weight": "q_proj",
        "linear_q_down_proj.weight": "q_a_proj",
        "linear_q_up_proj.layer_norm_weight": "q_a_layernorm",
        "linear_q_up_proj.weight": "q_b_proj",
        "linear_kv_down_proj.weight": "kv_a_proj_with_mqa",
        "linear_kv_up_proj.layer_norm_weight": "kv_a_layernorm",
        "linear_kv_up_proj.weight": "kv_b_proj",
        "linear_proj.weight": "o_proj",
    }
    return {
        f"self_attention.{ours}": whole(f"{llama.LAYER}.self_attn.{theirs}.weight")
        for ours, theirs in names.items()
    }


def decoder_layer() -> dict[str, Parts]:
    """Return, by our name, which Hugging Face tensors hold each weight of a decoder layer.

    The result covers both a dense layer and a layer with experts.
    """
    return {
        **llama.norms(),
        "input_layernorm.weight": whole(f"{llama.LAYER}.input_layernorm.weight"),
        **latent_attention(),
        **qwen2_moe.routed_experts(),
        **llama.gated_mlp("mlp.shared_experts", "mlp.shared_experts"),
    }


def with_depths(gpt: Gpt, vocab_size: int, layer: dict[str, Parts]) -> Table:
    """Return the weight table of a model with a router bias and any number of MTP depths.

    ``layer`` maps our names of a decoder layer's weights to the Hugging Face tensors that hold
    them.
    """
    names = {
        "enorm.weight": "enorm",
        "hnorm.weight": "hnorm",
        "eh_proj.weight": "eh_proj",
        "final_layernorm.weight": "shared_head.norm",
    }
    first = gpt.model.num_layers or 0
    copies = {}
    for number in range(first, first + (gpt.model.mtp_num_layers or 0)):
        copies[f"model.layers.{number}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"model.layers.{number}.shared_head.head.weight"] = "lm_head.weight"
    bias = {"mlp.router.expert_bias": whole(f"{llama.LAYER}.mlp.gate.{BIAS}")}
    return Table(
        llama.outer(vocab_size),
        {**layer, **bias},
        {ours: whole(f"{llama.LAYER}.{theirs}.weight") for ours, theirs in names.items()},
        copies,
        (BIAS,),
    )


def weights(gpt: Gpt, vocab_size: int) -> Table:
    return with_depths(gpt, vocab_size, decoder_layer())


FAMILY = llama.relative(
    {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        **BIASED_ROUTER,
    },
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    same=SAME,
    only=ONLY,
    read=read,
    write=write,
    weights=weights,
)
