"""SmolLM3: Llama in which every fourth layer has no positions."""

from typing import Any

from megatron_ext.config.layers import layers_without_rope
from megatron_ext.text.convert.entries import Switch, Translated, Window, list_flag
from megatron_ext.text.convert.families import llama
from megatron_ext.text.convert.family import Fields, Gpt, Settings


def _read(settings: Settings) -> Fields:
    # transformers derives the list from the interval if it is missing.
    rotates = [bool(rotates) for rotates in settings["no_rope_layers"]]
    lacks = [int(not each) for each in rotates]
    return {"no_rope_freq": list_flag(lacks) if any(lacks) else None}


def _write(gpt: Gpt) -> dict[str, Any]:
    lacks = layers_without_rope(gpt.positions.no_rope_freq, gpt.model.num_layers or 0)
    return {"no_rope_layers": [int(not each) for each in lacks]}


FAMILY = llama.BASE.but(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    says="layers without positions; biases; windows in some layers",
    entries=(
        llama.ATTENTION_BIAS,
        Switch("mlp_bias", ("add_mlp_bias",)),
        Window(switch="use_sliding_window", types="window"),
        Translated(("no_rope_freq",), ("no_rope_layers", "no_rope_layer_interval"), _read, _write),
    ),
)
