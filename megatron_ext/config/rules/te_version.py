"""Which version of Transformer Engine a run needs, and which one is installed.

The versions are those that megatron-core 0.16.1 requires (``is_te_min_version``), or later ones
where Transformer Engine's own source requires them. An option of the layers is in `NEEDS` only if
it needs a newer version than `MINIMUM`, the oldest one that is supported.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError

MINIMUM = "2.4.0"
"""The oldest version with all fp8 recipes: mxfp8 (since 2.0), tensorwise (2.2), blockwise (2.4)."""
DISTRIBUTION = "transformer-engine"


class Need(NamedTuple):
    """An option that needs Transformer Engine of at least the version ``minimum``.

    ``spelled`` is the option in error messages; ``used`` returns whether a run uses it.
    """

    spelled: str
    minimum: str
    used: Callable[[RunConfig], bool]


def _uses_layers(run: RunConfig) -> bool:
    return run.model.transformer_impl == TE_IMPL


def _recomputes(module: str) -> Callable[[RunConfig], bool]:
    return lambda run: (
        _uses_layers(run)
        and run.fp8.fp8_format is not None
        and run.model.recompute_granularity == "selective"
        and module in (run.model.recompute_modules or ())
    )


NEEDS: tuple[Need, ...] = (
    Need("--transformer-impl transformer_engine", MINIMUM, _uses_layers),
    Need("--cross-entropy-impl te", MINIMUM, lambda run: run.loss.cross_entropy_impl == "te"),
    Need("--recompute-modules layernorm` with `--fp8-format", "2.6.0", _recomputes("layernorm")),
    Need("--recompute-modules moe_act` with `--fp8-format", "2.6.0", _recomputes("moe_act")),
    Need(
        "--fp8-recipe custom",
        "2.9.0",
        lambda run: run.fp8.fp8_format is not None and run.fp8.fp8_recipe == "custom",
    ),
)


def found_version() -> str | None:
    """Return Transformer Engine's version without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_errors(run: RunConfig, installed: str) -> list[FlagError]:
    """Return an error for each option of the run that needs a newer Transformer Engine.

    ``installed`` is the version of Transformer Engine that is installed.
    """
    needed = {need.spelled: need.minimum for need in NEEDS if need.used(run)}
    for section in run.layer_sections:
        needed.update(section.te_versions(run))
    lacking = [spelled for spelled in needed if not _reaches(installed, needed[spelled])]
    if not _reaches(installed, MINIMUM):
        lacking = lacking[:1]  # too old for all: what else it lacks does not matter
    best = max(needed.values(), key=Version, default=MINIMUM)
    return [
        FlagError(
            spelled,
            None,
            f"needs Transformer Engine {needed[spelled]} or newer, but the installed one is "
            f"{installed}",
            f'run `pip install -U --no-build-isolation "transformer-engine[pytorch]>={best}"`',
        )
        for spelled in lacking
    ]


def _reaches(version: str, minimum: str) -> bool:
    try:
        return Version(version).release >= Version(minimum).release
    except InvalidVersion:
        return False
