"""Which version of Transformer Engine a run needs: a table, and the sentences that follow from it.

The numbers are those that megatron-core 0.16.1 asks for (its uses of ``is_te_min_version``), but
where Transformer Engine's own source says more; what is older than `MINIMUM` has no row.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

MINIMUM = "2.4.0"
"""The first with all of: mxfp8 (2.0), tensorwise (2.2), blockwise with its parameters (2.4)."""

DISTRIBUTION = "transformer-engine"


@dataclass(frozen=True)
class Need:
    """One feature and the first version that has it.

    Attributes:
        spelled: the flag as the user writes it.
        minimum: the first version.
        used: whether a run asks for it.
    """

    spelled: str
    minimum: str
    used: Callable[[RunConfig], bool]


def _uses_layers(run: RunConfig) -> bool:
    return run.model.transformer_impl == "transformer_engine"


def _recomputes(*modules: str) -> Callable[[RunConfig], bool]:
    def used(run: RunConfig) -> bool:
        selective = run.model.recompute_granularity == "selective" and _uses_layers(run)
        chosen = set(run.model.recompute_modules or ())
        return selective and run.fp8.fp8_format is not None and bool(chosen & set(modules))

    return used


NEEDS: tuple[Need, ...] = (
    Need("--transformer-impl transformer_engine", MINIMUM, _uses_layers),
    Need("--cross-entropy-impl te", MINIMUM, lambda run: run.loss.cross_entropy_impl == "te"),
    Need("--recompute-modules layernorm` with `--fp8-format", "2.6.0", _recomputes("layernorm")),
    Need("--recompute-modules moe_act` with `--fp8-format", "2.6.0", _recomputes("moe_act")),
    Need(
        "--moe-router-fusion",
        "2.7.0",
        lambda run: (
            _uses_layers(run) and run.moe.num_experts is not None and run.moe.moe_router_fusion
        ),
    ),
    Need("--softmax-type", "2.8.0", lambda run: run.model.softmax_type != "vanilla"),
    Need(
        "--fp8-recipe custom",
        "2.9.0",
        lambda run: run.fp8.fp8_format is not None and run.fp8.fp8_recipe == "custom",
    ),
)


def found_version() -> str | None:
    """Of the installed Transformer Engine, without importing it; None where there is none."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_errors(run: RunConfig, found: str) -> list[str]:
    """What of a run the installed Transformer Engine is too old for, one sentence each.

    Args:
        run: of any layers.
        found: its version, such as ``2.4.0+cu12``.
    """
    needed = [need for need in NEEDS if need.used(run)]
    lacking = [need for need in needed if not _reaches(found, need.minimum)]
    if not lacking:
        return []
    if not _reaches(found, MINIMUM):
        lacking = lacking[:1]  # too old for all: what else it lacks does not matter
    best = max((need.minimum for need in needed), key=Version)
    return [
        f"`{need.spelled}` needs Transformer Engine {need.minimum} or newer, but the installed one "
        f'is {found}; run `pip install -U --no-build-isolation "transformer-engine'
        f'[pytorch]>={best}"`.'
        for need in lacking
    ]


def _reaches(found: str, minimum: str) -> bool:
    try:
        return Version(found).release >= Version(minimum).release
    except InvalidVersion:
        return False
