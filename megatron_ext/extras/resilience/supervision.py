"""Implements `train.supervision`, the interface by which the training engine uses this add-on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from megatron_ext.config.fault_tolerance import DISABLED
from megatron_ext.config.run import RunConfig
from megatron_ext.disk.host_folder import host_folder
from megatron_ext.extras.resilience.elastic import elastic_sizes
from megatron_ext.extras.resilience.fault_supervisor import TellingSupervisor
from megatron_ext.extras.resilience.generation import RestartReport, follow_earlier_process
from megatron_ext.extras.resilience.hang_guard import hang_guard
from megatron_ext.extras.resilience.memory import MemoryCheckpoints
from megatron_ext.extras.resilience.recovery import Recovery
from megatron_ext.extras.resilience.rerun import Rerun
from megatron_ext.extras.resilience.restarts import (
    Fork,
    Main,
    RestartPolicy,
    restart_notes,
    supervise,
)
from megatron_ext.extras.resilience.resting_state import RestingState
from megatron_ext.extras.resilience.snapshots import Snapshots, snapshot_stores
from megatron_ext.extras.resilience.spikes import Spikes
from megatron_ext.extras.resilience.watcher import open_watcher
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.run import Run
from megatron_ext.train.supervision import Configure, Supervision
from megatron_ext.train.supervisor import SignalForwarder, Supervisor


class Resilience(Supervision):
    """Reports faults of ranks, restarts them, and keeps snapshots in memory for the restart."""

    def __init__(self, config: RunConfig | None = None) -> None:
        super().__init__(config)
        self._sizes: tuple[int, ...] = ()
        faults = None if config is None else config.fault_tolerance
        if faults is not None and (faults.max_restarts or faults.is_elastic):
            self.max_restarts = faults.max_restarts

    def notes(self) -> list[str]:
        return [] if self.config is None else restart_notes(self.config)

    def prepare(self, configure: Configure) -> None:
        if self.config is not None:
            self._sizes = elastic_sizes(self.config, configure)
            self.is_elastic = self.max_restarts is not None and len(self._sizes) > 1

    def run(
        self,
        fork: Fork,
        main_of: Callable[[int], Main],
        *,
        timeout_minutes: float,
        exit_signal: ExitSignal,
    ) -> int:
        assert self.config is not None
        policy = RestartPolicy.of_run(self.config, self._sizes, main_of)
        return supervise(fork, policy, timeout_minutes=timeout_minutes, exit_signal=exit_signal)

    def supervisor(
        self, world_size: int, forwarder: SignalForwarder, timeout_minutes: float, save: str | None
    ) -> Supervisor:
        watcher = open_watcher(host_folder(), world_size, timeout_minutes)
        return TellingSupervisor(forwarder, timeout_minutes, watcher=watcher, save=save)

    def follow_earlier_process(self) -> None:
        follow_earlier_process()

    def guard(self, rank: int) -> AbstractContextManager[None]:
        return nullcontext() if self.config is None else hang_guard(self.config, rank)

    def stores(self, context: ParallelContext) -> list[MemoryCheckpoints]:
        assert self.config is not None
        return snapshot_stores(self.config.checkpoint, context, host_folder())

    def recoveries(
        self, stores: Sequence[MemoryCheckpoints], context: ParallelContext
    ) -> list[Recovery]:
        return [Recovery(store, context) for store in stores]

    def callbacks(self, run: Run, settle: Callable[[], None]) -> list[Callback]:
        flags = run.config.fault_tolerance
        built: list[Callback] = []
        if RestartReport.is_due(run):
            built.append(RestartReport(run))
        if flags.rerun_mode != DISABLED:
            built.append(Rerun(run))
        if flags.on_spike is not None:
            built.append(Spikes(run))
        if flags.check_state_interval is not None:
            built.append(RestingState(run))
        if run.stores:
            built.append(Snapshots(run, settle))
        return built
