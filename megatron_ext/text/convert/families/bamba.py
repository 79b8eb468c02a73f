"""Bamba: Mamba-2 in most layers, attention in the others, an MLP in each."""

from __future__ import annotations

import math
from typing import Any

from megatron_ext.config.layers import ATTENTION, DENSE, mixer_of
from megatron_ext.text.convert.entries import Rotary, Switch, Translated, copies
from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Entry, Fields, Gpt, Settings
from megatron_ext.text.convert.mamba_rows import mamba

MAMBA = "M"
_HEADS = ("mamba_num_heads", "mamba_head_dim")
_LIMITS = ("mamba_time_step_min", "mamba_time_step_max")


def _read_layers(settings: Settings) -> Fields:
    attends = settings["attn_layer_indices"] or ()
    layers = range(settings["num_hidden_layers"])
    beyond = [layer for layer in attends if layer not in layers]
    if beyond:
        advice = f"give indices below `num_hidden_layers` {len(layers)}"
        settings.refuse("attn_layer_indices", attends, advice)
    mixers = (ATTENTION if layer in attends else MAMBA for layer in layers)
    return {"hybrid_layer_pattern": "".join(mixer + DENSE for mixer in mixers)}


def _write_layers(gpt: Gpt) -> dict[str, Any]:
    attends = [layer for layer, kind in enumerate(gpt.kinds) if mixer_of(kind) == ATTENTION]
    return {"num_hidden_layers": len(gpt.kinds), "attn_layer_indices": attends}


def _read_heads(settings: Settings) -> Fields:
    return {
        "mamba_num_heads": settings["mamba_n_heads"],
        "mamba_head_dim": settings["mamba_d_head"],
    }


def _write_heads(gpt: Gpt) -> dict[str, Any]:
    size = gpt.mixer.mamba_head_dim
    hidden = gpt.model.hidden_size or 1
    heads = gpt.mixer.mamba_num_heads or 2 * hidden // size
    entries = {"mamba_n_heads": heads, "mamba_d_head": size}
    return {**entries, "mamba_expand": max(1, heads * size // hidden)}


def _read_limits(settings: Settings) -> Fields:
    low, high = settings["time_step_limit"] or (0.0, math.inf)
    return {
        "mamba_time_step_min": float(low),
        "mamba_time_step_max": None if math.isinf(high) else float(high),
    }


def _write_limits(gpt: Gpt) -> dict[str, Any]:
    high = gpt.mixer.mamba_time_step_max
    low = gpt.mixer.mamba_time_step_min
    if high is None and not low:
        return {}
    return {"time_step_limit": [low, math.inf if high is None else high]}


STEP_LIMITS = Translated(_LIMITS, ("time_step_limit",), _read_limits, _write_limits)
"""The limits of steps."""
SIZES: tuple[Entry, ...] = (
    *copies(
        {
            "mamba_state_dim": "mamba_d_state",
            "mamba_num_groups": "mamba_n_groups",
            "mamba_conv_kernel_dim": "mamba_d_conv",
        }
    ),
    Switch("mamba_conv_bias", ("mamba_conv_bias",)),
    Translated(
        _HEADS, ("mamba_n_heads", "mamba_d_head", "mamba_expand"), _read_heads, _write_heads
    ),
    STEP_LIMITS,
)
"""The sizes of Mamba-2."""
FAMILY = llama.BASE.but(
    model_type="bamba",
    architecture="BambaForCausalLM",
    says="Mamba-2 in most layers, attention in the others, partly rotary heads",
    entries=(
        Translated(
            ("num_layers", "hybrid_layer_pattern"),
            ("num_hidden_layers", "attn_layer_indices"),
            _read_layers,
            _write_layers,
            ("`attn_layer_indices` of layers that are not there",),
        ),
        *SIZES,
        Rotary(default_share=0.5, share_always=True),
        llama.ATTENTION_BIAS,
        Switch("mlp_bias", ("add_mlp_bias",)),
    ),
    only={"mamba_proj_bias": False},
    weights=llama.WEIGHTS.but(
        outer={"decoder.final_layernorm.{kind}": "model.final_layernorm.{kind}"},
        layer=mamba("mamba"),
        renamed={"mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm"},
    ),
)
