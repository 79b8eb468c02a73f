"""Mellum 2: Qwen3 with experts, windows in some layers, and a rotary base of their own."""

import dataclasses
from typing import Any

from megatron_ext.text.convert.entries import Requires, Window
from megatron_ext.text.convert.families import deepseek_v3, gemma3, qwen3_moe
from megatron_ext.text.convert.family import Fields, Gpt, Settings


def _read(settings: Settings) -> Fields:
    for rotary in settings["rope_parameters"].values():
        if rotary.get("partial_rotary_factor") not in (None, 1.0):
            settings.refuse("rope_parameters", advice="use a model whose heads rotate as a whole")
    return gemma3.TWO_BASES.read(settings)


def _write(gpt: Gpt) -> dict[str, Any]:
    entries = gemma3.TWO_BASES.write(gpt)
    del entries["rope_local_base_freq"]
    return entries


FAMILY = qwen3_moe.FAMILY.but(
    model_type="mellum",
    architecture="MellumForCausalLM",
    says="experts, windows in some layers, two rotary bases",
    entries=(
        Window(types="always", keeps=True),
        dataclasses.replace(gemma3.TWO_BASES, keys=gemma3.ROTARY.keys, reader=_read, writer=_write),
        deepseek_v3.MLP_WORDS,
        Requires("num_nextn_predict_layers", 0),
    ),
    weights=qwen3_moe.FAMILY.weights,
)
