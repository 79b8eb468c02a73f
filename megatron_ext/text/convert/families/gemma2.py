"""Gemma 2: GELU gates, norms before and after each block, soft caps, and alternating windows."""

from typing import Any

from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.table import Table, whole

FIXED = {
    "swiglu": False,
    "geglu": True,
    "apply_layernorm_1p": True,
    "sandwich_norm": True,
}
ONLY = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": False,
}


def read_scales(settings: Settings) -> Fields:
    """Return the configuration fields of the two soft caps and of two scales.

    The scales are those of the embeddings and of the attention scores.
    """
    return {
        "embedding_multiplier": float(settings["hidden_size"]) ** 0.5,
        "softmax_scale": float(settings["query_pre_attn_scalar"]) ** -0.5,
        "attn_logit_softcapping": settings["attn_logit_softcapping"],
        "final_logit_softcapping": settings["final_logit_softcapping"],
    }


def write_scales(gpt: Gpt) -> dict[str, Any]:
    """Return the entries of config.json for the scale of attention scores and the two soft caps."""
    scale = gpt.attention.softmax_scale or (gpt.model.kv_channels or 1) ** -0.5
    scalar = round(scale**-2, 6)
    own: dict[str, Any] = {
        "attn_logit_softcapping": gpt.attention.attn_logit_softcapping,
        "final_logit_softcapping": gpt.model.final_logit_softcapping,
    }
    return own | {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


def read(settings: Settings) -> Fields:
    return llama.read(settings) | read_scales(settings) | llama.read_window(settings)


def write(gpt: Gpt) -> dict[str, Any]:
    # transformers needs a number for the window even if no layer has one; so leave out the entry
    # then, for the default.
    windows = llama.write_layer_types(gpt)
    if gpt.attention.window_size is not None:
        windows |= llama.write_window(gpt)
    return llama.write(gpt) | write_scales(gpt) | windows


def weights(gpt: Gpt, vocab_size: int) -> Table:
    norms = {
        llama.INPUT_NORM: "input_layernorm",
        "post_self_attn_layernorm.weight": "post_attention_layernorm",
        llama.DENSE_NORM: "pre_feedforward_layernorm",
        "post_mlp_layernorm.weight": "post_feedforward_layernorm",
    }
    layer = {
        **{ours: whole(f"{llama.LAYER}.{theirs}.weight") for ours, theirs in norms.items()},
        **llama.attention(gpt),
        **llama.gated_mlp(),
    }
    return Table(llama.outer(vocab_size), layer)


FAMILY = llama.relative(
    FIXED,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    only=ONLY,
    read=read,
    write=write,
    weights=weights,
)
