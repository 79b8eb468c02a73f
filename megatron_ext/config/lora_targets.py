"""Names of the layers that get LoRA adapters, and of parts that train whole beside them.

``--lora-target-modules`` takes the former, ``--lora-modules-to-save`` the latter.

A layer's kind is its name without numbers, such as ``blocks.self_attention.linear_qkv``. A target
names each layer whose kind ends with it: ``linear_qkv``, or ``self_attention.linear_qkv``. The
kinds of routed experts end with ``experts.linear_fc1`` and ``experts.linear_fc2``.
"""

from __future__ import annotations

import re

from megatron_ext.config.optimizer import ALL_TARGETS, LoraConfig

_NUMBER = re.compile(r"(\.local_experts)?\.\d+(?=\.|$)")


def kind_of(layer: str) -> str:
    """Return a layer's name without the numbers of its block and expert."""
    return _NUMBER.sub("", layer)


def is_named(layer: str, target: str) -> bool:
    """Return whether ``target`` names a layer, which is given by its name or kind."""
    return f".{kind_of(layer)}".endswith(f".{target}")


def adapts(lora: LoraConfig, layer: str) -> bool:
    """Return whether a layer, by its name or kind, is one of those that get adapters."""
    if lora.lora_rank is None:
        return False
    targets = ALL_TARGETS if lora.lora_target_modules is None else lora.lora_target_modules
    return any(is_named(layer, target) for target in targets)


_WHOLE = {
    "embedding": re.compile(r"(^|\.)embedding\."),
    "output_layer": re.compile(r"(^|\.)output_layer\."),
    "router": re.compile(r"\.router\."),
    "norm": re.compile(r"norm(\.|_)(weight|bias)$"),
}
"""Patterns of the names of parameters, by value of ``--lora-modules-to-save``."""


def trains_whole(lora: LoraConfig, parameter: str, *, tied: bool = False) -> bool:
    """Return whether a parameter of the model itself is trained beside adapters.

    ``tied`` says whether it is the output layer of a model whose output layer is its embedding.
    """
    whole = lora.lora_modules_to_save or ()
    if tied and "embedding" in whole:
        return True
    return any(_WHOLE[part].search(parameter) for part in whole)
