"""Granite with windows, sinks, and rotary bases by layer."""

from typing import Any

from megatron_ext.config.layers import layers_without_rope
from megatron_ext.text.convert.entries import Rotary, Translated, Window, list_flag
from megatron_ext.text.convert.families import granite
from megatron_ext.text.convert.family import Fields, Gpt, Settings

ROTARY = Rotary()
KEY = "layer_rope_theta"


def _read(settings: Settings) -> Fields:
    """A base of 0 or null stands for a layer without positions."""
    window = "sliding_attention"
    kinds = settings["layer_types"]
    bases = [float(base or 0) for base in settings[KEY]]
    fields = ROTARY.read(settings)
    lacks = [int(not base) for base in bases]
    own: Fields = {"no_rope_freq": list_flag(lacks) if any(lacks) else None}
    local = {base for base, kind in zip(bases, kinds, strict=True) if base and kind == window}
    usual = {base for base, kind in zip(bases, kinds, strict=True) if base and kind != window}
    if max(len(local), len(usual)) > 1:
        settings.refuse(
            KEY, advice="use a model with one base in layers with a window, and one in the others"
        )
    own["rotary_base"] = next(iter(usual or local), fields["rotary_base"])
    if local and local != {own["rotary_base"]}:
        if fields.keys() > {"rotary_base", "rotary_percent"}:
            settings.refuse(KEY, advice="use a model whose positions are not scaled")
        own["rope_local_base_freq"] = next(iter(local))
    return fields | own


def _write(gpt: Gpt) -> dict[str, Any]:
    positions = gpt.positions
    lacks = layers_without_rope(positions.no_rope_freq, gpt.model.num_layers or 0)
    windowed = gpt.attention.windowed_layers(gpt.model)
    local = positions.rope_local_base_freq or positions.rotary_base
    bases = [local if has else positions.rotary_base for has in windowed]
    return ROTARY.write(gpt) | {
        KEY: [0 if lack else base for lack, base in zip(lacks, bases, strict=True)]
    }


FAMILY = granite.GRANITE.but(
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    says="windows, sinks, rotary bases by layer",
    entries=(
        Window(types="always", keeps=True),
        Translated(
            (*ROTARY.fields, "rope_local_base_freq", "no_rope_freq"),
            (*ROTARY.keys, KEY),
            _read,
            _write,
            ("more than two rotary bases",),
        ),
    ),
    fixed={"softmax_type": "learnable"},
    weights=granite.GRANITE.weights.but(
        layer={"self_attention.core_attention.softmax_offset": "self_attn.sinks"}
    ),
)
