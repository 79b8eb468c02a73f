"""Gemma 3, text only: Gemma 2 with query and key norms, and a separate rotary base for windows."""

from typing import Any

from megatron_ext.text.convert.entries import WINDOWED, Rotary, Translated, Window
from megatron_ext.text.convert.families import gemma2
from megatron_ext.text.convert.family import Fields, Gpt, Settings

FULL = "full_attention"
ROTARY = Rotary()


def _read_rotary(settings: Settings) -> Fields:
    """Layers with a sliding window have a separate rotary base, and unscaled positions."""
    rotary = {kind: dict(settings["rope_parameters"][kind]) for kind in (FULL, WINDOWED)}
    fields = ROTARY.read(settings.replaced(rope_parameters=rotary[FULL]))
    if rotary[WINDOWED].get("rope_type", "default") != "default":
        settings.refuse("rope_parameters", rotary)
    if WINDOWED not in settings["layer_types"] or not settings["sliding_window"]:
        return fields
    return fields | {"rope_local_base_freq": float(rotary[WINDOWED]["rope_theta"])}


def _write_rotary(gpt: Gpt) -> dict[str, Any]:
    entries = ROTARY.write(gpt)
    scaling = entries.pop("rope_scaling") or {"rope_type": "default"}
    local = gpt.positions.rope_local_base_freq or gpt.positions.rotary_base
    return entries | {
        "rope_local_base_freq": local,
        "rope_parameters": {
            FULL: {**scaling, "rope_theta": entries.pop("rope_theta")},
            WINDOWED: {"rope_type": "default", "rope_theta": local},
        },
    }


TWO_BASES = Translated(
    (*ROTARY.fields, "rope_local_base_freq"),
    (*ROTARY.keys, "rope_local_base_freq"),
    _read_rotary,
    _write_rotary,
    ("scaled positions in layers with a window",),
)
FAMILY = gemma2.FAMILY.but(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    says="norms of queries and keys, two rotary bases",
    entries=(Window(types="always", keeps=True), TWO_BASES),
    fixed={"qk_layernorm": True},
)
