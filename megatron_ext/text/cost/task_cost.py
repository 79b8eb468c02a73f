"""`GPT_COST`, with which planning finds the formulas of a GPT's cost when it needs them."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.task_cost import TaskCost
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.train.task import later

RECOMPUTATION: dict[str, dict[str, object]] = {
    "none": {
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": None,
    },
    "selective": {
        "recompute_granularity": "selective",
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": ["core_attn"],
    },
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "recompute_modules": None,
    },
}
"""The modes of recomputation, each with the fields of `ModelConfig` that it sets."""


def with_recomputation(config: RunConfig, mode: str) -> RunConfig:
    """Return the configuration with the recomputation that ``mode`` of `RECOMPUTATION` names."""
    model = replace(config.model, **RECOMPUTATION[mode])  # type: ignore[arg-type]
    return replace(config, model=model)


def num_experts(config: RunConfig) -> int:
    """Return ``--num-experts``, or 0 without experts."""
    return config.section(MoEConfig).num_experts or 0


GPT_COST = TaskCost(
    cases=later("megatron_ext.text.cost.network:cases"),
    modes=tuple(RECOMPUTATION),
    recompute=with_recomputation,
    from_flags=True,
    num_experts=num_experts,
)
