"""Sizes -> rank grid -> process groups -> RNG seeds.

``python -m megatron_ext.layout --tensor-model-parallel-size 2 --world-size 16`` prints the grid.
The grid is pure Python; what needs torch is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ext.layout.grid import Layout
from megatron_ext.layout.placement import Placement

if TYPE_CHECKING:
    from megatron_ext.layout.context import (
        ParallelContext,
        embedding_ranks,
        init_groups,
        mtp_rank,
        seed_everything,
    )

__all__ = [
    "Layout",
    "ParallelContext",
    "Placement",
    "embedding_ranks",
    "init_groups",
    "mtp_rank",
    "seed_everything",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from megatron_ext.layout import context

        return getattr(context, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
