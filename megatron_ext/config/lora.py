"""Full parameters, or low-rank adapters on frozen ones (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.config.flags import flag

if TYPE_CHECKING:
    from megatron_ext.config.model import ModelConfig
    from megatron_ext.config.moe import MoEConfig
    from megatron_ext.config.optimizer import OptimizerConfig

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
DEFAULT_ALPHA = 32.0


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: ``y = W x + (alpha / rank) * B A dropout(x)`` with a frozen W."""

    lora_rank: int | None = flag(None, "rank of the adapters; without it all parameters train")
    lora_alpha: float | None = flag(
        None, f"adapters are scaled by this over the rank; default {DEFAULT_ALPHA:g}"
    )
    lora_dropout: float = flag(0.0, "dropout of the inputs of adapters")
    lora_target_modules: list[str] = flag(
        list(TARGETS), "linear layers that get an adapter", nargs="+"
    )
    lora_rslora: bool = flag(False, "divide by the root of the rank instead (arXiv:2312.03732)")

    @property
    def scale(self) -> float:
        """The factor of ``B A x``; of a configuration with a rank."""
        assert self.lora_rank is not None
        alpha = DEFAULT_ALPHA if self.lora_alpha is None else self.lora_alpha
        return alpha / (math.sqrt(self.lora_rank) if self.lora_rslora else self.lora_rank)

    def resolved(self) -> LoraConfig:
        """With the default alpha, where there are adapters."""
        if self.lora_rank is None or self.lora_alpha is not None:
            return self
        return dataclasses.replace(self, lora_alpha=DEFAULT_ALPHA)

    def errors(self, model: ModelConfig, moe: MoEConfig, optimizer: OptimizerConfig) -> list[str]:
        """What cannot be run, one sentence each."""
        if self.lora_rank is None:
            return self._errors_without_rank()
        return [*self._own_errors(), *self._errors_with(model, moe, optimizer)]

    def _errors_without_rank(self) -> list[str]:
        default = LoraConfig()
        return [
            f"`--{field.name.replace('_', '-')}` needs `--lora-rank`; give a rank such as 16."
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]

    def _own_errors(self) -> list[str]:
        found = []
        if self.lora_rank is not None and self.lora_rank < 1:
            found.append(
                f"`--lora-rank` ({self.lora_rank}) must be at least 1; leave it out to train all "
                "parameters."
            )
        if self.lora_alpha is not None and self.lora_alpha <= 0:
            found.append(f"`--lora-alpha` ({self.lora_alpha:g}) must be above 0; use 32.")
        if not 0 <= self.lora_dropout < 1:
            found.append(
                f"`--lora-dropout` ({self.lora_dropout:g}) must be at least 0 and below 1."
            )
        unknown = [name for name in self.lora_target_modules if name not in TARGETS]
        if unknown or not self.lora_target_modules:
            found.append(
                f"`--lora-target-modules` ({' '.join(unknown)}) must be names among "
                f"{', '.join(TARGETS)}."
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
        mlp = [name for name in self.lora_target_modules if name.startswith("linear_fc")]
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
