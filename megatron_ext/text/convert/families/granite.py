"""Granite and HyperCLOVA X: Llama with factors of embeddings, branches, scores and logits."""

from typing import Any

from megatron_ext.text.convert.entries import Converted, Switch, Translated
from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings


def _read_scale(settings: Settings) -> Fields:
    return {"softmax_scale": float(settings["attention_multiplier"])}


def _write_scale(gpt: Gpt) -> dict[str, Any]:
    usual = (gpt.model.kv_channels or 1) ** -0.5
    return {"attention_multiplier": gpt.attention.softmax_scale or usual}


FACTORS = (
    Converted("embedding_multiplier", "embedding_multiplier", 1.0),
    Converted("residual_multiplier", "residual_multiplier", 1.0),
    Translated(("softmax_scale",), ("attention_multiplier",), _read_scale, _write_scale),
)
"""The factors of embeddings, branches and scores."""
GRANITE = llama.BASE.but(
    model_type="granite",
    architecture="GraniteForCausalLM",
    says="factors of embeddings, branches, scores and logits; biases",
    entries=(
        *FACTORS,
        Converted("logits_scaling", "logits_scaling", 1.0),
        llama.ATTENTION_BIAS,
        Switch("mlp_bias", ("add_mlp_bias",)),
    ),
)
HYPERCLOVAX = GRANITE.but(
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    says="Granite's factors; norms before and after",
    entries=(
        # Its logits are multiplied, Granite's are divided.
        Converted("logits_scaling", "logits_scaling", 1.0, lambda x: 1.0 / x, lambda x: 1.0 / x),
        Switch("use_post_norm", ("sandwich_norm",)),
    ),
    weights=llama.WEIGHTS.but(
        layer={
            "post_self_attn_layernorm.{kind}": "post_norm1.{kind}",
            "post_mlp_layernorm.{kind}": "post_norm2.{kind}",
        }
    ),
)
FAMILIES = (GRANITE, HYPERCLOVAX)
