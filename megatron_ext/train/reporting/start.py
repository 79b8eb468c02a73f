"""The lines that a run prints at its start."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from megatron.core.optimizer import MegatronOptimizer

from megatron_ext.config.run import RunConfig
from megatron_ext.config.te_versions import found_version
from megatron_ext.config.transformer_engine import TE_IMPL

OURS = __name__.split(".")[0]


def implementation_line(config: RunConfig, optimizer: MegatronOptimizer | None) -> str:
    """Name the implementations that a run uses; the optimizer is the one that was really built."""
    return "; ".join(
        (
            f"layers: {_layers(config)}",
            f"attention: {_attention(config)}",
            f"optimizer: {_optimizer(optimizer)}",
            f"fp8: {_fp8(config)}",
        )
    )


def _layers(config: RunConfig) -> str:
    if config.model.transformer_impl == TE_IMPL:
        return f"Transformer Engine {found_version() or 'of an unknown version'}"
    return f"torch {importlib.metadata.version('torch')}"


def _attention(config: RunConfig) -> str:
    if config.model.transformer_impl == TE_IMPL:
        return f"Transformer Engine ({config.model.attention_backend})"
    return "torch SDPA"


def _optimizer(optimizer: MegatronOptimizer | None) -> str:
    """Name the class that computes, and its package; a subclass of ours adds no arithmetic."""
    if optimizer is None:
        return "none"
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = next((part.optimizer for part in parts if part.optimizer is not None), None)
    if inner is None:
        return "none on this rank"
    roots = {kind: kind.__module__.split(".")[0] for kind in type(inner).__mro__}
    kind, root = next((kind, root) for kind, root in roots.items() if root != OURS)
    fused = " fused" if any(group.get("fused") for group in inner.param_groups) else ""
    return f"{root} {kind.__name__}{fused}"


def _fp8(config: RunConfig) -> str:
    fp8 = config.fp8
    if fp8.fp8_format is None:
        return "none"
    weights = ", weights kept in 8 bits" if fp8.fp8_param_gather else ""
    return f"{fp8.fp8_format} by the {fp8.fp8_recipe} recipe{weights}"
