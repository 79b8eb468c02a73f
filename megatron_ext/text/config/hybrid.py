"""The flag that describes a GPT by a pattern of layers; `text.hybrid` reads the pattern."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.flags import flag


@dataclass(frozen=True)
class HybridConfig:
    """The flag that lists a GPT's layers as letters, as in Megatron-LM's hybrid models."""

    hybrid_layer_pattern: str | None = flag(
        None,
        "build the GPT from layers of attention (*) and of an MLP (-) or experts (E), such as "
        "*-*-|*-*-: | ends a pipeline stage, / begins a depth of multi-token prediction",
        names="--hybrid-override-pattern",
        if_changed="allow",
    )
