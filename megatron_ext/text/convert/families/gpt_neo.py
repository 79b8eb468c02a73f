"""GPT-Neo: GPT-2 with windows in every other layer, and scores of attention that are not scaled."""

from typing import Any

from megatron_ext.text.convert.entries import (
    ACTIVATIONS,
    Choice,
    Dropout,
    Heads,
    Translated,
    copies,
    list_flag,
)
from megatron_ext.text.convert.families import gpt2
from megatron_ext.text.convert.family import Fields, Gpt, Settings
from megatron_ext.text.convert.weights import separate_qkv


def _read_windows(settings: Settings) -> Fields:
    # The list for each layer follows from `attention_types`, which a config.json gives.
    kinds = settings["attention_layers"]
    settings.read.add("attention_types")
    if not all(kind in ("global", "local") for kind in kinds):
        settings.refuse("attention_types", advice="use global and local")
    has = [int(kind == "local") for kind in kinds]
    window = int(settings["window_size"])
    if window < 1:
        settings.refuse("window_size", window, "give the tokens of the local layers' window")
    if not any(has) or window >= settings["max_position_embeddings"]:
        return {}
    fields: Fields = {"window_size": (window - 1, 0)}
    return fields if all(has) else fields | {"window_attn_skip_freq": list_flag(has)}


def _write_windows(gpt: Gpt) -> dict[str, Any]:
    has = gpt.attention.windowed_layers(gpt.model)
    types = [[["local" if each else "global"], 1] for each in has]
    window = gpt.attention.window_size
    own = {} if window is None else {"window_size": window[0] + 1}
    return {"attention_types": types, **own}


WINDOWS = Translated(
    ("window_size", "window_attn_skip_freq"),
    ("window_size", "attention_types", "attention_layers"),
    _read_windows,
    _write_windows,
)
WIDTH = Translated(
    ("ffn_hidden_size",),
    ("intermediate_size",),
    lambda settings: {
        "ffn_hidden_size": settings["intermediate_size"] or 4 * settings["hidden_size"]
    },
    lambda gpt: {"intermediate_size": gpt.model.ffn_hidden_size},
)
FAMILY = gpt2.FAMILY.but(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    says="windows in every other layer, scores without a factor, no biases of queries and keys",
    entries=(
        *copies(
            {
                "num_layers": "num_layers",
                "hidden_size": "hidden_size",
                "max_position_embeddings": "max_position_embeddings",
            }
        ),
        Heads("num_heads", groups=None, size=None),
        WIDTH,
        WINDOWS,
        Choice("activation_function", ACTIVATIONS),
        Dropout("attention_dropout", "attention_dropout"),
        Dropout("hidden_dropout", "resid_dropout"),
    ),
    fixed={
        "softmax_scale": 1.0,
        "add_bias_linear": False,
        "add_proj_bias": True,
        "add_mlp_bias": True,
    },
    without=("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"),
    weights=gpt2.WEIGHTS.but(
        layer={
            "self_attention.linear_qkv.{kind}": separate_qkv(
                "attn.attention.q_proj.{kind}",
                "attn.attention.k_proj.{kind}",
                "attn.attention.v_proj.{kind}",
            ),
            "self_attention.linear_proj.{kind}": "attn.attention.out_proj.{kind}",
            "mlp.linear_fc1.{kind}": "mlp.c_fc.{kind}",
            "mlp.linear_fc2.{kind}": "mlp.c_proj.{kind}",
        }
    ),
)
