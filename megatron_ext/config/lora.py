"""Full parameters, or low-rank adapters on frozen ones (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import BELOW_ONE, FACTOR, SIZE, IfChanged, flag

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers of a GPT's blocks."""

ALL_TARGETS = (*TARGETS, "linear_q", "linear_kv")
"""Linear layers that may have adapters: those of cross-attention are projected apart."""

DEFAULT_ALPHA = 32.0


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: ``y = W x + (alpha / rank) * B A dropout(x)`` with a frozen W."""

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    lora_rank: int | None = flag(
        None, "rank of the adapters; without it all parameters train", bounds=SIZE
    )
    lora_alpha: float | None = flag(
        None,
        f"adapters are scaled by this over the rank; default {DEFAULT_ALPHA:g}",
        bounds=FACTOR,
        advice="use 32",
        if_changed="refuse_to_resume",
    )
    lora_dropout: float = flag(
        0.0, "dropout of the inputs of adapters", bounds=BELOW_ONE, if_changed="say"
    )
    lora_target_modules: list[str] | None = flag(
        None, "linear layers that get an adapter; default: all of a block", nargs="+"
    )
    lora_rslora: bool = flag(
        False,
        "scale adapters by --lora-alpha over the root of the rank, instead of the rank "
        "(arXiv:2312.03732)",
        if_changed="refuse_to_resume",
    )

    saves_adapters_only: bool = False
    """Checkpoints leave out the frozen weights, as where several networks share them."""

    @property
    def scale(self) -> float:
        """Return the factor of ``B A x``, for a configuration with a rank."""
        assert self.lora_rank is not None
        alpha = DEFAULT_ALPHA if self.lora_alpha is None else self.lora_alpha
        return alpha / (math.sqrt(self.lora_rank) if self.lora_rslora else self.lora_rank)

    def resolved(self) -> LoraConfig:
        """Return the section with default alpha and layers, where there are adapters."""
        if self.lora_rank is None:
            return self
        alpha = DEFAULT_ALPHA if self.lora_alpha is None else self.lora_alpha
        targets = self.lora_target_modules
        return dataclasses.replace(
            self,
            lora_alpha=alpha,
            lora_target_modules=list(TARGETS) if targets is None else targets,
        )
