"""Gemma 3, text only: Gemma 2 with query and key norms, and a separate rotary base for windows."""

import dataclasses
from typing import Any

from megatron_ext.text.convert.families import gemma2, llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings

FULL, WINDOW = "full_attention", "sliding_attention"


def read(settings: Settings) -> Fields:
    """Return the configuration fields of a Gemma 3 model.

    Layers with a sliding window have a separate rotary base, and unscaled positions.
    """
    rotary = {kind: dict(settings["rope_parameters"][kind]) for kind in (FULL, WINDOW)}
    own = dataclasses.replace(settings, values={**settings.values, "rope_parameters": rotary[FULL]})
    fields = llama.read(own) | gemma2.read_scales(settings) | llama.read_window(settings)
    if rotary[WINDOW].get("rope_type", "default") != "default":
        settings.refuse("rope_parameters", rotary)
    return fields | {"rope_local_base_freq": float(rotary[WINDOW]["rope_theta"])}


def write(gpt: Gpt) -> dict[str, Any]:
    entries = gemma2.write(gpt)
    scaling = entries.pop("rope_scaling") or {"rope_type": "default"}
    local = gpt.positions.rope_local_base_freq or gpt.positions.rotary_base
    return entries | {
        "rope_local_base_freq": local,
        "rope_parameters": {
            FULL: {**scaling, "rope_theta": entries.pop("rope_theta")},
            WINDOW: {"rope_type": "default", "rope_theta": local},
        },
    }


FAMILY = llama.relative(
    gemma2.FIXED | {"qk_layernorm": True},
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    only=gemma2.ONLY,
    read=read,
    write=write,
    weights=gemma2.weights,
)
