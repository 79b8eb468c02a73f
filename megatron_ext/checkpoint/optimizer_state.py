"""Two things that megatron-core's distributed optimizer lacks when its Adam is torch's own.

Without Transformer Engine or apex it cannot list its state before the first update, and reading
fully reshardable state trips over the step count that torch keeps for each parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def parts_of(optimizer: MegatronOptimizer | None) -> list[Any]:
    """The optimizers of a chain (dense and expert weights have their own)."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def is_distributed(optimizer: MegatronOptimizer | None) -> bool:
    """Whether optimizer state is spread over data-parallel ranks."""
    return any(isinstance(part, DistributedOptimizer) for part in parts_of(optimizer))


def prime(optimizer: MegatronOptimizer) -> None:
    """Give an Adam that has made no update the state of step 0, which is all zeros."""
    for part in parts_of(optimizer):
        inner = getattr(part, "optimizer", None)
        if not isinstance(part, DistributedOptimizer) or not isinstance(inner, torch.optim.Adam):
            continue
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                inner.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load each optimizer of a chain."""
    parts = parts_of(optimizer)
    if not is_distributed(optimizer):
        optimizer.load_state_dict(state)
        return
    states = [state] if len(parts) == 1 else [value for _, value in sorted(state.items())]
    for part, part_state in zip(parts, states, strict=True):
        _load_part(part, part_state)


def _load_part(part: Any, state: dict[str, Any]) -> None:
    torch_adam = isinstance(getattr(part, "optimizer", None), torch.optim.Adam)
    if not torch_adam or state.get("param_state_sharding_type") != "fully_reshardable":
        part.load_state_dict(state)
        return
    part.load_state_dict({k: v for k, v in state.items() if k != "param_state"})
    inner = part.optimizer.state
    # Core copies every entry of the state, and the checkpoint holds the step for all at once.
    steps = {p: entry.pop("step") for p, entry in inner.items() if "step" in entry}
    part.load_parameter_state_from_fully_reshardable(state["param_state"])
    for parameter, step in steps.items():
        inner[parameter]["step"] = step.clone()
