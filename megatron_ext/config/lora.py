"""Full parameters, or low-rank adapters on frozen ones (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_ext.config.flags import BELOW_ONE, FACTOR, SIZE, IfChanged, flag

if TYPE_CHECKING:
    from megatron_ext.config.model import ModelConfig
    from megatron_ext.config.moe import MoEConfig
    from megatron_ext.config.optimizer import OptimizerConfig

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers of a GPT's blocks."""

VIDEO_TARGETS = (*TARGETS, "linear_q", "linear_kv")
"""Of the blocks of `video.model.wan`, whose attention to the text has its own."""

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
        "divide by the root of the rank instead (arXiv:2312.03732)",
        if_changed="refuse_to_resume",
    )

    @property
    def scale(self) -> float:
        """The factor of ``B A x``; of a configuration with a rank."""
        assert self.lora_rank is not None
        alpha = DEFAULT_ALPHA if self.lora_alpha is None else self.lora_alpha
        return alpha / (math.sqrt(self.lora_rank) if self.lora_rslora else self.lora_rank)

    def resolved(self, *, streams: bool) -> LoraConfig:
        """With default alpha and layers, where there are adapters.

        Args:
            streams: the run is ``--task streaming``.
        """
        if self.lora_rank is None:
            return self
        alpha = DEFAULT_ALPHA if self.lora_alpha is None else self.lora_alpha
        targets = self.lora_target_modules
        if targets is None:
            targets = list(VIDEO_TARGETS if streams else TARGETS)
        return dataclasses.replace(self, lora_alpha=alpha, lora_target_modules=targets)

    def errors(
        self, model: ModelConfig, moe: MoEConfig, optimizer: OptimizerConfig, *, streams: bool
    ) -> list[str]:
        """What cannot be run, one sentence each."""
        if self.lora_rank is None:
            return self._errors_without_rank()
        known = VIDEO_TARGETS if streams else TARGETS
        found = [*self._own_errors(known), *self._errors_with(model, moe, optimizer)]
        if self.lora_dropout and streams:
            found.append(
                f"`--lora-dropout` ({self.lora_dropout:g}) does not go with `--task streaming`, "
                "whose blocks are run again for their gradients and must give the same; use 0."
            )
        return found

    def _errors_without_rank(self) -> list[str]:
        default = LoraConfig()
        return [
            f"`--{field.name.replace('_', '-')}` needs `--lora-rank`; give a rank such as 16."
            for field in dataclasses.fields(self)
            # Stored configurations may name the layers of a GPT's blocks though nothing asks it.
            if getattr(self, field.name) not in (getattr(default, field.name), list(TARGETS))
        ]

    def _own_errors(self, known: Sequence[str]) -> list[str]:
        found = []
        targets = self.lora_target_modules
        unknown = [name for name in targets or () if name not in known]
        if unknown or targets == []:
            found.append(
                f"`--lora-target-modules` ({' '.join(unknown)}) must be names among "
                f"{', '.join(known)}."
            )
        return found

    def _errors_with(
        self, model: ModelConfig, moe: MoEConfig, optimizer: OptimizerConfig
    ) -> list[str]:
        found = []
        if model.transformer_impl == "transformer_engine":
            found.append(
                "`--lora-rank` needs our torch layers, not `--transformer-impl "
                "transformer_engine`; use torch."
            )
        targets = TARGETS if self.lora_target_modules is None else self.lora_target_modules
        mlp = [name for name in targets if name.startswith("linear_fc")]
        if moe.num_experts and mlp:
            found.append(
                f"`--lora-target-modules` ({' '.join(mlp)}) does not go with `--num-experts` "
                f"({moe.num_experts}), since experts take no adapters; use linear_qkv linear_proj."
            )
        if moe.num_experts and moe.moe_router_enable_expert_bias:
            found.append(
                "`--moe-router-enable-expert-bias` would change the frozen model of `--lora-rank`; "
                "leave it out."
            )
        if self.lora_dropout and model.deterministic_dropout:
            found.append(
                "`--lora-dropout` does not go with `--deterministic-dropout`, which gives "
                "adapters no masks; use a dropout of 0 for one of them."
            )
        if optimizer.decoupled_lr is not None:
            found.append(
                "`--decoupled-lr` is for the embedding and the output layer, which `--lora-rank` "
                "freezes; leave it out."
            )
        return found
