"""`TaskCost`, with which a task tells planning what its runs cost.

A task is imported before its flags are read, so this module imports no part of planning.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.config.precision import CudaGraphConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.device.host import this_host

if TYPE_CHECKING:
    from megatron_ext.device.gpus import Gpu
    from megatron_ext.planning.network import Case
    from megatron_ext.planning.sheet import Report
    from megatron_ext.planning.switch import Switch


def ranks_here(config: RunConfig) -> int:
    """Return the number of ranks of a run that a launcher has started, or will start, here."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", config.parallel.world_size))


@dataclass(frozen=True)
class TaskCost:
    """The functions with which a task describes the cost of its runs to planning.

    Attributes:
        cases: takes a resolved configuration; returns a `Case` for each kind of batch. It may open
            the run's data.
        modes: names of the recomputation modes that a report compares, from none to full.
        recompute: takes a configuration and a mode; returns the configuration with this mode.
        from_flags: whether the cases depend only on the flags, not on the data. Only then can
            layouts be searched, and can a run on CPUs be checked against its host's memory.
        report: None for tasks that `report_cases` reports. A task whose step does not train exactly
            one network gives a function here, which takes a configuration and a GPU or None, and
            returns the report.
        most_memory: takes a configuration; returns a rough upper bound of the bytes that a rank
            with the whole model would need, by which a small run is known to fit its host.
        num_experts: takes a configuration; returns the number of experts in a layer that expert
            parallelism can divide, or 0 without experts.
        switches: takes a configuration; returns what a search tries with and without.
    """

    cases: Callable[[RunConfig], Sequence[Case]] = lambda _: ()
    modes: tuple[str, ...] = ("none",)
    recompute: Callable[[RunConfig, str], RunConfig] = lambda config, _: config
    from_flags: bool = False
    report: Callable[[RunConfig, Gpu | None], Report] | None = None
    most_memory: Callable[[RunConfig], float] = lambda _: math.inf
    num_experts: Callable[[RunConfig], int] = lambda _: 0
    switches: Callable[[RunConfig], Sequence[Switch]] = lambda _: ()

    def may_exceed_host(self, config: RunConfig) -> bool:
        """Return whether the exact formulas of `planning.host_memory` are needed to check a run.

        A small run is known to fit this host without them, whatever its layout. They cannot check a
        run whose cases depend on data.
        """
        most = self.most_memory(config) * ranks_here(config)
        return self.from_flags and most > this_host().memory

    def modes_with(self, graphs: CudaGraphConfig) -> tuple[str, ...]:
        """Return the recomputation modes that a run can use; with CUDA graphs only ``none``."""
        return self.modes if graphs.cuda_graph_impl == "none" else ("none",)
