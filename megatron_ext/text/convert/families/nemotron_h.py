"""Nemotron-H and Nemotron 3: Mamba-2, attention without positions, MLPs and experts as layers."""

from __future__ import annotations

from typing import Any

from megatron_ext.config.layers import ATTENTION, DENSE, EXPERTS
from megatron_ext.text.convert.entries import ACTIVATIONS, Choice, Switch, Translated, copies
from megatron_ext.text.convert.families import deepseek_v3, llama
from megatron_ext.text.convert.families.bamba import MAMBA, STEP_LIMITS
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.mamba_rows import mamba
from megatron_ext.text.convert.weights import separate_qkv, vocabulary

NAMES = {"linear_attention": MAMBA, "full_attention": ATTENTION, "mlp": DENSE, "moe": EXPERTS}
"""The letter of each kind of layer."""
_WIDTH = "moe_ffn_hidden_size"
_SHARED = "moe_shared_expert_intermediate_size"
_GROUPS = deepseek_v3.groups(ranking=2)
_SCALE = deepseek_v3.scaled("routed_scaling_factor")


def _letters(settings: Settings) -> str:
    """Return the letter of each layer; refuse entries that say different layers.

    transformers reads the first of these entries alone, and assumes four layers without them.
    """
    settings.read.update(("hybrid_override_pattern", "num_hidden_layers"))
    letters = "".join(NAMES[kind] for kind in settings["layers_block_type"])
    if settings.given.get("hybrid_override_pattern", letters) != letters:
        settings.refuse(
            "hybrid_override_pattern",
            settings.given["hybrid_override_pattern"],
            f"make it agree with `layers_block_type`, which says {letters}, or leave one out",
        )
    count = settings.given.get("num_hidden_layers")
    if count not in (None, len(letters)):
        settings.refuse(
            "num_hidden_layers",
            count,
            f"give `hybrid_override_pattern` or `layers_block_type`, now of {len(letters)} layers, "
            f"for {count}",
        )
    return letters


def _read_layers(settings: Settings) -> Fields:
    letters = _letters(settings)
    fields: Fields = {"hybrid_layer_pattern": letters}
    if EXPERTS not in letters:
        return fields
    settings.require("norm_topk_prob", True)
    fields |= deepseek_v3.BIASED_ROUTER
    fields |= {
        "num_experts": settings["n_routed_experts"],
        "moe_router_topk": settings["num_experts_per_tok"],
        "moe_latent_size": settings["moe_latent_size"],
        _WIDTH: settings["moe_intermediate_size"],
        _SHARED: settings["moe_shared_expert_intermediate_size"],
    }
    return fields | _GROUPS.read(settings) | _SCALE.read(settings)


def _write_layers(gpt: Gpt) -> dict[str, Any]:
    letters = "".join(gpt.kinds)
    names = {letter: name for name, letter in NAMES.items()}
    entries: dict[str, Any] = {
        "layers_block_type": [names.get(letter, letter) for letter in letters],
        "hybrid_override_pattern": letters,
        "num_hidden_layers": len(letters),
    }
    if gpt.moe.num_experts is None:
        return entries
    return {
        **entries,
        "norm_topk_prob": True,
        "n_routed_experts": gpt.moe.num_experts,
        "num_experts_per_tok": gpt.moe.moe_router_topk,
        "moe_latent_size": gpt.value("moe_latent_size"),
        "moe_intermediate_size": gpt.moe.moe_ffn_hidden_size or gpt.model.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": gpt.value(_SHARED) or 0,
        **_GROUPS.write(gpt),
        **_SCALE.write(gpt),
    }


LAYERS = Translated(
    (
        "num_layers", "hybrid_layer_pattern", "moe_layer_freq", "num_experts", "moe_router_topk",
        "moe_latent_size", _WIDTH, _SHARED, *deepseek_v3.BIASED_ROUTER, *_GROUPS.fields,
        *_SCALE.fields,
    ),
    (
        "layers_block_type", "hybrid_override_pattern", "num_hidden_layers", "n_routed_experts",
        "num_experts_per_tok", "moe_latent_size", "moe_intermediate_size",
        "moe_shared_expert_intermediate_size", "norm_topk_prob", *_GROUPS.keys, *_SCALE.keys,
    ),
    _read_layers,
    _write_layers,
    ("`norm_topk_prob` other than true", "entries that say different layers"),
)  # fmt: skip
"""The layers, each with one module, and the experts of those that have them."""


def _as_published(gpt: Gpt) -> dict[str, Any]:
    # It must be positive, since initial values are drawn from its logarithm on.
    return {"time_step_min": gpt.mixer.mamba_time_step_min or 1e-30}


FAMILY = llama.BASE.but(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    says="Mamba-2, attention without positions, MLPs with squared ReLU and experts, in any order",
    entries=(
        LAYERS,
        *copies(
            {
                "norm_epsilon": "layer_norm_epsilon",
                "mamba_num_heads": "mamba_num_heads",
                "mamba_head_dim": "mamba_head_dim",
                "mamba_state_dim": "ssm_state_size",
                "mamba_num_groups": "n_groups",
                "mamba_conv_kernel_dim": "conv_kernel",
            }
        ),
        # The code of the published models limits steps to `time_step_limit`. transformers' class
        # keeps them above `time_step_min` instead, which is of initial values (its issue 48989).
        STEP_LIMITS,
        Switch("use_conv_bias", ("mamba_conv_bias",)),
        Choice("mlp_hidden_act", {"relu2": ACTIVATIONS["relu2"], **ACTIVATIONS}),
    ),
    fixed={
        "position_embedding_type": "none",
        "swiglu": False,
        "untie_embeddings_and_output_weights": True,
    },
    only={
        "mamba_hidden_act": "silu",
        "use_bias": False,
        "mlp_bias": False,
        # transformers' class ties nothing.
        "tie_word_embeddings": False,
    },
    without=("rope_theta", "hidden_act"),
    as_published=_as_published,
    weights=llama.WEIGHTS.but(
        without=("self_attention.", "input_layernorm", "mlp.", "pre_mlp_layernorm"),
        outer={
            "embedding.word_embeddings.weight": vocabulary("backbone.embeddings.weight"),
            "decoder.final_layernorm.{kind}": "backbone.norm_f.{kind}",
        },
        layer={
            "input_layernorm.{kind}": "norm.{kind}",
            "self_attention.linear_qkv.layer_norm_{kind}": "norm.{kind}",
            "self_attention.linear_qkv.{kind}": separate_qkv(
                "mixer.q_proj.{kind}", "mixer.k_proj.{kind}", "mixer.v_proj.{kind}"
            ),
            "self_attention.linear_proj.{kind}": "mixer.o_proj.{kind}",
            **mamba("mixer"),
            "mlp.linear_fc1.layer_norm_{kind}": "norm.{kind}",
            "pre_mlp_layernorm.{kind}": "norm.{kind}",
            "mlp.linear_fc1.{kind}": "mixer.up_proj.{kind}",
            "mlp.linear_fc2.{kind}": "mixer.down_proj.{kind}",
            "mlp.experts.experts.linear_fc1.weight": "mixer.experts.{expert}.up_proj.weight",
            "mlp.experts.experts.linear_fc2.weight": "mixer.experts.{expert}.down_proj.weight",
            "mlp.router.weight": "mixer.gate.weight",
            "mlp.router.expert_bias": f"mixer.gate.{deepseek_v3.BIAS}",
            "mlp.shared_experts.linear_fc1.weight": "mixer.shared_experts.up_proj.weight",
            "mlp.shared_experts.linear_fc2.weight": "mixer.shared_experts.down_proj.weight",
            "mlp.fc1_latent_proj.weight": "mixer.fc1_latent_proj.weight",
            "mlp.fc2_latent_proj.weight": "mixer.fc2_latent_proj.weight",
        },
        renamed={"model.layers": "backbone.layers"},
        exact=(deepseek_v3.BIAS,),
        unused=("mtp.",),
        halves=True,
    ),
)
