"""Flags of where a decoder layer normalizes, and of the factors of what it adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import FACTOR, changed_fields, fixed_flag, resumed_flag, spelling_of
from megatron_ext.config.run import LayerSection, RunConfig


@dataclass(frozen=True)
class BlockConfig(LayerSection):
    """The flags of norms and factors in a decoder layer that Megatron-LM does not have."""

    SECTION: ClassVar[str] = "block"

    reordered_norm: bool = fixed_flag(
        False,
        "normalize the outputs of attention and MLP, before they are added, instead of their "
        "inputs, as in OLMo 2",
    )
    qk_layernorm_all_heads: bool = fixed_flag(
        False, "let --qk-layernorm normalize the channels of all heads together, as in OLMo 2"
    )
    qk_layernorm_after_rope: bool = fixed_flag(
        False, "let --qk-layernorm normalize queries and keys after their rotation, as in Hunyuan"
    )
    norm_elementwise_affine: bool = fixed_flag(
        True, "learn a weight, and a bias, of the norms; without it, as in OLMo 1, they have none"
    )
    norm_bias: bool = fixed_flag(
        True, "learn a bias of each LayerNorm; without it, as in Cohere, they have a weight alone"
    )
    use_parallel_residual: bool = fixed_flag(
        False,
        "let attention and MLP both read the input of their layer, as in GPT-NeoX, instead of one "
        "after the other",
    )
    shared_input_norm: bool = fixed_flag(
        False, "one norm for both branches of --use-parallel-residual, as in GPT-J and Falcon"
    )
    xielu: bool = fixed_flag(
        False, "xIELU in the MLP, an activation function with two weights in each layer (Apertus)"
    )
    residual_multiplier: float = resumed_flag(
        1.0, "factor of the outputs of attention and MLP before they are added (Granite)", FACTOR
    )
    logits_scaling: float = resumed_flag(1.0, "divisor of the logits (Granite)", FACTOR)

    def transformer_fields(self, config: RunConfig) -> Mapping[str, object]:
        """Return the fields of `StepTransformerConfig` with the same names."""
        return dataclasses.asdict(self)

    def torch_only(self) -> list[str]:
        """Return the given flags that Transformer Engine's layers do not support."""
        names = [name for name in changed_fields(self) if name != "logits_scaling"]
        return [spelling_of(self, name) for name in names]
