"""Ministral: Mistral with windows in some layers; Ministral 3: queries grow with their position."""

from typing import Any

from megatron_ext.text.convert.entries import Rotary, Translated, Window
from megatron_ext.text.convert.families import llama, mistral
from megatron_ext.text.convert.family import Fields, Gpt, Settings

ROTARY = Rotary()
GROWTH = "llama_4_scaling_beta"


def _read(settings: Settings) -> Fields:
    given = dict(settings["rope_parameters"] or settings["rope_scaling"] or {})
    growth = given.pop(GROWTH, None)
    # The longest position is an entry of its own, too.
    given.pop("max_position_embeddings", None)
    fields = ROTARY.read(settings.replaced(rope_parameters=given))
    return {**fields, GROWTH: float(growth) if growth else None}


def _write(gpt: Gpt) -> dict[str, Any]:
    entries = ROTARY.write(gpt)
    growth = gpt.positions.llama_4_scaling_beta
    if entries["rope_scaling"] is None:
        return entries
    own = {"rope_theta": gpt.positions.rotary_base, GROWTH: growth or 0.0}
    return {"rope_parameters": entries["rope_scaling"] | own}


MINISTRAL = mistral.FAMILY.but(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    says="windows in some layers",
    entries=(Window(types="always"),),
)
MINISTRAL3 = llama.BASE.but(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    says="queries grow with their position; sliding windows",
    entries=(Window(), Translated((*ROTARY.fields, GROWTH), ROTARY.keys, _read, _write)),
)
FAMILIES = (MINISTRAL, MINISTRAL3)
