"""Gemma 2: GELU gates, norms before and after each block, soft caps, and alternating windows."""

from typing import Any

from megatron_ext.text.convert.entries import Copy, Translated, Window
from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings


def _read_scales(settings: Settings) -> Fields:
    return {
        "embedding_multiplier": float(settings["hidden_size"]) ** 0.5,
        "softmax_scale": float(settings["query_pre_attn_scalar"]) ** -0.5,
    }


def _write_scales(gpt: Gpt) -> dict[str, Any]:
    scale = gpt.attention.softmax_scale or (gpt.model.kv_channels or 1) ** -0.5
    scalar = round(scale**-2, 6)
    return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


SCALES = Translated(
    ("embedding_multiplier", "softmax_scale"),
    ("query_pre_attn_scalar",),
    _read_scales,
    _write_scales,
)
"""The factors of the embeddings and of the scores of attention."""
SANDWICHED = {
    "post_self_attn_layernorm.{kind}": "post_attention_layernorm.{kind}",
    "mlp.linear_fc1.layer_norm_{kind}": "pre_feedforward_layernorm.{kind}",
    "pre_mlp_layernorm.{kind}": "pre_feedforward_layernorm.{kind}",
    "post_mlp_layernorm.{kind}": "post_feedforward_layernorm.{kind}",
}
"""The sources of norms before and after each block."""
FAMILY = llama.BASE.but(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    says="GELU gates, norms before and after, soft caps, query scale, windows",
    entries=(
        Window(types="always"),
        SCALES,
        Copy("attn_logit_softcapping", "attn_logit_softcapping"),
        Copy("final_logit_softcapping", "final_logit_softcapping"),
    ),
    fixed={
        "swiglu": False,
        "geglu": True,
        "apply_layernorm_1p": True,
        "sandwich_norm": True,
    },
    only={
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": False,
    },
    weights=llama.WEIGHTS.but(layer=SANDWICHED),
)
