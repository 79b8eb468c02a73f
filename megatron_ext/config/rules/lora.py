"""Rules of low-rank adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_ext.config.lora import TARGETS, LoraConfig
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.moe import MoEConfig
from megatron_ext.config.optimizer import OptimizerConfig


def _errors_without_rank(lora: LoraConfig) -> list[str]:
    default = LoraConfig()
    return [
        f"`--{field.name.replace('_', '-')}` needs `--lora-rank`; give a rank such as 16."
        for field in dataclasses.fields(lora)
        # Stored configurations may name the layers of a GPT's blocks though nothing asks it.
        if getattr(lora, field.name) not in (getattr(default, field.name), list(TARGETS))
    ]


def target_errors(lora: LoraConfig, known: Sequence[str]) -> list[str]:
    """Return a sentence where adapters are asked for on layers that the model lacks.

    Args:
        lora: the section.
        known: names of the layers that may have an adapter.
    """
    found = []
    targets = lora.lora_target_modules
    unknown = [name for name in targets or () if name not in known]
    if unknown or targets == []:
        found.append(
            f"`--lora-target-modules` ({' '.join(unknown)}) must be names among {', '.join(known)}."
        )
    return found


def lora_errors(
    lora: LoraConfig, model: ModelConfig, moe: MoEConfig, optimizer: OptimizerConfig
) -> list[str]:
    """Return a sentence for everything that adapters do not go with."""
    if lora.lora_rank is None:
        return _errors_without_rank(lora)
    found = []
    if model.transformer_impl == "transformer_engine":
        found.append(
            "`--lora-rank` needs our torch layers, not `--transformer-impl "
            "transformer_engine`; use torch."
        )
    targets = TARGETS if lora.lora_target_modules is None else lora.lora_target_modules
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
    if lora.lora_dropout and model.deterministic_dropout:
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
