"""Kimi Linear: Kimi Delta Attention between latent attention without positions, and experts."""

from typing import Any

from megatron_ext.config.layers import ATTENTION, EXPERTS, mixer_of, mlp_of
from megatron_ext.text.convert.delta_rows import heads_in_turn, separate_convolution, with_ones
from megatron_ext.text.convert.entries import Requires, Translated, copies
from megatron_ext.text.convert.families import deepseek_v3, llama, qwen2_moe, qwen3_next
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.weights import Weights, joined

DELTA = "K"
LATENT_EPSILON = 1e-6
"""The epsilon that transformers gives to the norms of latent vectors in any case."""


def _check_lists(settings: Settings) -> None:
    """Refuse lists of layers that differ from ``layer_types``, or do not have each layer once.

    Moonshot AI's code reads the lists, and transformers ``layer_types`` if both are given.
    """
    given = settings.given.get("linear_attn_config") or {}
    settings.ignored.extend(
        f"linear_attn_config.{key}" for key in sorted(given.keys() - _OF_LAYERS)
    )
    lists = {qwen3_next.FULL: "full_attn_layers", qwen3_next.LINEAR: "kda_layers"}
    if not given.keys() & set(lists.values()):
        return
    for kind, key in lists.items():
        types = enumerate(settings["layer_types"], start=1)
        layers = [number for number, own in types if own == kind]
        if sorted(given.get(key) or ()) != layers:
            settings.refuse(
                f"linear_attn_config.{key}",
                given.get(key) or [],
                f"give {layers} as `layer_types` says, and each layer in one of the lists",
            )


_OF_LAYERS = {"full_attn_layers", "kda_layers", "num_heads", "head_dim", "short_conv_kernel_size"}
"""The entries of ``linear_attn_config``."""


def _read_layers(settings: Settings) -> Fields:
    settings.read.update(("linear_attn_config", "first_k_dense_replace"))
    _check_lists(settings)
    mixers = qwen3_next.mixers(settings, DELTA)
    mlps = [EXPERTS if kind == "sparse" else "-" for kind in settings["mlp_layer_types"]]
    return {"hybrid_layer_pattern": "".join(map("".join, zip(mixers, mlps, strict=True)))}


def _write_layers(gpt: Gpt) -> dict[str, Any]:
    names = {True: "sparse", False: "dense"}
    return {
        "layer_types": qwen3_next.layer_types(gpt),
        "mlp_layer_types": [names[mlp_of(kind) == EXPERTS] for kind in gpt.kinds],
    }


LAYERS = Translated(
    ("hybrid_layer_pattern", "moe_layer_freq"),
    ("layer_types", "mlp_layer_types", "first_k_dense_replace"),
    _read_layers,
    _write_layers,
    (qwen3_next.REFUSED_TYPES, "lists of `linear_attn_config` that say other layers"),
)
"""The mixer of each layer, and whether it has experts."""


def _read_sizes(settings: Settings) -> Fields:
    heads = settings["linear_num_heads"]
    size = settings["linear_head_dim"]
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": settings["linear_conv_kernel_dim"],
    }


def _write_sizes(gpt: Gpt) -> dict[str, Any]:
    mixer = gpt.mixer
    layers = {True: list[int](), False: list[int]()}
    for number, kind in enumerate(gpt.kinds, start=1):
        layers[mixer_of(kind) == ATTENTION].append(number)
    return {
        "linear_num_heads": mixer.linear_num_value_heads,
        "linear_head_dim": mixer.linear_value_head_dim,
        "linear_conv_kernel_dim": mixer.linear_conv_kernel_dim,
        # The code of Moonshot AI reads these.
        "linear_attn_config": {
            "full_attn_layers": layers[True],
            "kda_layers": layers[False],
            "num_heads": mixer.linear_num_value_heads,
            "head_dim": mixer.linear_value_head_dim,
            "short_conv_kernel_size": mixer.linear_conv_kernel_dim,
        },
    }


SIZES = Translated(
    (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ),
    ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "linear_attn_config"),
    _read_sizes,
    _write_sizes,
)
"""The sizes of Kimi Delta Attention, whose heads are all of one kind."""


def _read_epsilon(settings: Settings) -> Fields:
    epsilon = settings["rms_norm_eps"]
    own = None if epsilon == LATENT_EPSILON else LATENT_EPSILON
    return {"norm_epsilon": epsilon, "latent_norm_epsilon": own}


EPSILON = Translated(
    ("norm_epsilon", "latent_norm_epsilon"),
    ("rms_norm_eps",),
    _read_epsilon,
    lambda gpt: {"rms_norm_eps": gpt.model.norm_epsilon},
)
EXPERTS_PATH = "block_sparse_moe"


def _weights(dense: str) -> Weights:
    """Return the weights of files in which the MLPs without experts have the path ``dense``."""
    expert = f"{EXPERTS_PATH}.experts.{{expert}}"
    return deepseek_v3.LATENT_WEIGHTS.but(
        layer={
            "self_attention.in_proj.weight": heads_in_turn(
                *(f"self_attn.{name}_proj.weight" for name in "qkvb")
            ),
            "self_attention.conv_weight": separate_convolution(
                *(f"self_attn.{name}_conv1d.weight" for name in "qkv")
            ),
            "self_attention.dt_bias": "self_attn.dt_bias",
            "self_attention.A_log": with_ones("self_attn.A_log", 0, 1, 3),
            "self_attention.out_norm.weight": "self_attn.o_norm.weight",
            "self_attention.out_proj.weight": "self_attn.o_proj.weight",
            **{
                f"self_attention.{name}_proj.weight": f"self_attn.{name}_proj.weight"
                for name in ("f_a", "f_b", "g_a", "g_b")
            },
            "mlp.experts.experts.linear_fc1.weight": joined(
                f"{expert}.w1.weight", f"{expert}.w3.weight"
            ),
            "mlp.experts.experts.linear_fc2.weight": f"{expert}.w2.weight",
            "mlp.router.weight": f"{EXPERTS_PATH}.gate.weight",
            "mlp.router.expert_bias": f"{EXPERTS_PATH}.gate.{deepseek_v3.BIAS}",
            **qwen2_moe.shared_experts(f"{EXPERTS_PATH}.shared_experts"),
            "mlp.linear_fc1.weight": joined(f"{dense}.gate_proj.weight", f"{dense}.up_proj.weight"),
            "mlp.linear_fc2.weight": f"{dense}.down_proj.weight",
        },
        exact=(deepseek_v3.BIAS, "self_attn.A_log", "self_attn.dt_bias"),
    )


FAMILY = llama.BASE.but(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    says="Kimi Delta Attention between latent attention without positions, experts",
    entries=(
        *copies(
            {
                "kv_lora_rank": "kv_lora_rank",
                "q_lora_rank": "q_lora_rank",
                "qk_head_dim": "qk_nope_head_dim",
                "qk_pos_emb_head_dim": "qk_rope_head_dim",
                "v_head_dim": "v_head_dim",
                "max_position_embeddings": "model_max_length",
                "num_experts": "num_experts",
                "moe_router_topk": "num_experts_per_token",
            }
        ),
        deepseek_v3.HEADS,
        EPSILON,
        LAYERS,
        SIZES,
        deepseek_v3.widths("num_shared_experts"),
        deepseek_v3.scaled("routed_scaling_factor"),
        deepseek_v3.groups(2, number="num_expert_group", per_token="num_experts_per_token"),
        Requires("num_nextn_predict_layers", 0),
        Requires("moe_layer_freq", 1),
    ),
    fixed={
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "position_embedding_type": "none",
        "untie_embeddings_and_output_weights": True,
        **deepseek_v3.BIASED_ROUTER,
    },
    only={
        "attention_bias": False,
        "moe_renormalize": True,
        "tie_word_embeddings": False,
        # Moonshot AI's code reads these.
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
    },
    without=("rope_theta",),
    weights=_weights("mlp"),
    # transformers writes all MLPs so.
    read_too=(_weights(EXPERTS_PATH),),
)
