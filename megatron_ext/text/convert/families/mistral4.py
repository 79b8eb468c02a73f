"""Mistral 4: latent attention whose queries grow with their position, and softmax experts."""

from typing import Any

from megatron_ext.text.convert.entries import Translated
from megatron_ext.text.convert.families import deepseek_v3, llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.weights import whole

GROWTH = "llama_4_scaling_beta"
_SHARE = "partial_rotary_factor"


def _read(settings: Settings) -> Fields:
    given = dict(settings["rope_parameters"] or {})
    growth = given.pop(GROWTH, None)
    # The longest position is an entry of its own, too.
    given.pop("max_position_embeddings", None)
    rotated = settings["qk_rope_head_dim"]
    plain = settings["qk_nope_head_dim"]
    if settings["head_dim"] not in (None, rotated + plain):
        settings.refuse("head_dim", advice=f"leave it out, or give {rotated + plain}")
    # transformers counts the share that turns over all channels of a key.
    share = given.pop(_SHARE, None)
    if share is not None and int((rotated + plain) * share) != rotated:
        settings.refuse(_SHARE, share, "use a model in which all of `qk_rope_head_dim` turns")
    fields = deepseek_v3.POSITIONS.read(settings.replaced(rope_parameters=given))
    return {**fields, GROWTH: float(growth) if growth else None}


def _write(gpt: Gpt) -> dict[str, Any]:
    entries = deepseek_v3.POSITIONS.write(gpt)
    scaling = entries.pop("rope_scaling") or {"rope_type": "default"}
    own = {"rope_theta": entries.pop("rope_theta")}
    if gpt.positions.llama_4_scaling_beta is not None:
        own[GROWTH] = gpt.positions.llama_4_scaling_beta
    return entries | {"rope_parameters": scaling | own}


FAMILY = llama.BASE.but(
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    says="latent attention, queries grow with their position, groups of experts, stacked experts",
    entries=(
        *(x for x in deepseek_v3.LATENT if x is not deepseek_v3.POSITIONS),
        Translated(
            (*deepseek_v3.POSITIONS.fields, GROWTH),
            deepseek_v3.POSITIONS.keys,
            _read,
            _write,
            deepseek_v3.POSITIONS.limits(),
        ),
        *deepseek_v3.experts(ranking=2),
    ),
    fixed={
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "moe_router_pre_softmax": True,
        "moe_router_norm_topk_prob": True,
    },
    only={"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True},
    weights=deepseek_v3.LATENT_WEIGHTS.but(
        layer={
            "mlp.experts.experts.linear_fc1.weight": whole(
                "mlp.experts.gate_up_proj", stacked=True
            ),
            "mlp.experts.experts.linear_fc2.weight": whole("mlp.experts.down_proj", stacked=True),
        }
    ),
    read_too=(deepseek_v3.LATENT_WEIGHTS,),
)
