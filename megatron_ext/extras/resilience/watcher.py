"""Watches the ranks of a machine: reads their board (`parallel.board`) and gathers evidence.

If our own launcher has forked the ranks, it runs the watcher. torchrun's agent runs none, so each
rank runs one in a thread; only the watcher of the lowest rank whose thread still runs reports.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron_ext.disk.events import append_event
from megatron_ext.disk.host_folder import generation
from megatron_ext.extras.resilience.postmortem import Case
from megatron_ext.extras.resilience.process import GONE, MemoryKills, ProcessState, process_states
from megatron_ext.extras.resilience.slow import SlowRank, SlowRanks, own_times
from megatron_ext.extras.resilience.waits import blame
from megatron_ext.extras.resilience.watch import USUAL, Fault, Limits, Verdict, verdicts
from megatron_ext.extras.resilience.watchdog import Evidence, ask_flights, collect
from megatron_ext.parallel.board import BOARD, RING, Board, RankRecord

SECONDS_BETWEEN_MEASUREMENTS = 15.0
"""Seconds between two measurements of the time that each rank computes."""
_SECONDS_BETWEEN_STATES = 1.0
_SECONDS_OF_A_PAUSE = 2.0
"""If calls of `Watcher.look` are more seconds apart, the whole machine must have been suspended."""


class Watcher:
    """Finds dead, hanging and slow ranks among the ``num_ranks`` ranks of a machine.

    It reads the `Board` in ``folder``: shared memory in which each rank records what it does.

    Attributes:
        resident: last known bytes in main memory, by rank.
    """

    def __init__(self, folder: Path, num_ranks: int, limits: Limits = USUAL) -> None:
        self.folder = folder
        self.limits = limits
        self.board = Board(folder / BOARD, num_ranks)
        self.resident: dict[int, int] = {}
        self._kills = MemoryKills()
        self._states: dict[int, ProcessState] = {}
        self._states_at = self._looked = self._counts_from = 0.0
        self._quiet: dict[int, tuple[float, float]] = {}
        self._slow = SlowRanks()
        self._slow_at = time.monotonic()

    def look(self, pids: Mapping[int, int] | None = None) -> list[Verdict]:
        """Return the faults at this moment; a call takes about 0.1 ms.

        ``pids`` are the processes to check, by rank; by default these are all that have written to
        the board. Pass ``pids`` if ranks may have been restarted: slots of the board that still
        belong to earlier processes are then ignored.
        """
        now = time.monotonic()
        if now - self._looked > _SECONDS_OF_A_PAUSE:
            self._counts_from = now
        self._looked = now
        board = self._records(1, pids)
        if not board:
            return []
        silent = now - max(record.last_time for record in board)
        if now - self._states_at > _SECONDS_BETWEEN_STATES or silent > self.limits.floor:
            self._take_states(board, now)
        counted = [self._from_the_pause(record) for record in board]
        return verdicts(counted, now, self._states, self.limits, self._busy(board, now))

    def _records(self, num_events: int, pids: Mapping[int, int] | None) -> list[RankRecord]:
        board = self.board.read(num_events)
        return [r for r in board if pids is None or pids.get(r.rank) == r.pid]

    def _from_the_pause(self, record: RankRecord) -> RankRecord:
        """Return a rank's record, changed so that a pause of the machine does not count as silence.

        During a pause, such as a suspension, no process runs. If the rank has written nothing since
        the last pause, all times in its record are replaced by the time at which the pause ended.
        Otherwise the record is unchanged.
        """
        if record.last_time >= self._counts_from:
            return record
        events = [replace(event, time=self._counts_from) for event in record.events]
        return replace(record, events=tuple(events), started=self._counts_from)

    def _take_states(self, board: list[RankRecord], now: float) -> None:
        self._states_at = now
        self._states = process_states(record.pid for record in board)
        for record in board:
            state = self._states[record.pid]
            if state.resident:
                self.resident[record.rank] = state.resident
            last, _ = self._quiet.get(record.pid, (-1.0, 0.0))
            if record.last_time != last:
                self._quiet[record.pid] = (record.last_time, state.cpu_seconds)

    def _busy(self, board: list[RankRecord], now: float) -> bool:
        """Return whether any rank has computed for most of the time since its last record.

        This is measured by the processor time of the rank's process.
        """
        for record in board:
            last, before = self._quiet.get(record.pid, (now, 0.0))
            used = self._states.get(record.pid, GONE).cpu_seconds - before
            if record.last_time == last and used > 0.5 * (now - last) > 0.0:
                return True
        return False

    def killed_for_memory(self) -> bool:
        """Return whether the kernel has killed a process for memory since the last call."""
        return self._kills.happened()

    def tell_slow_ranks(
        self,
        save: str | None,
        pids: Mapping[int, int] | None = None,
        seconds: float = SECONDS_BETWEEN_MEASUREMENTS,
    ) -> list[SlowRank]:
        """Return the ranks that are newly slow; print a line and log an event for each.

        Each rank is named once. This requests the ranks' latest collectives, which takes each rank
        some milliseconds; so a call does nothing within ``seconds`` of the last request, or while a
        rank is silent. ``save`` is the folder with the log of faults. For ``pids`` see `look`.
        """
        now = time.monotonic()
        if now - self._slow_at < seconds:
            return []
        ranks = self._records(1, pids)
        if any(record.ended or now - record.last_time > 1.0 for record in ranks):
            return []  # `look` handles these ranks
        flights = ask_flights(self.folder, [record.rank for record in ranks])
        self._slow_at = time.monotonic()
        board = self._records(RING, pids)
        own = own_times(board, flights)
        if own is None:
            return []
        slow_ranks = self._slow.judge(own, {record.rank: record.pipeline_rank for record in board})
        for slow in slow_ranks:
            iteration = max(record.iteration for record in board)
            facts = {"seconds": slow.seconds, "usual": slow.usual, "iteration": iteration}
            append_event(save, "slow_rank", rank=slow.rank, generation=generation(), **facts)
            print(str(slow), file=sys.stderr, flush=True)
        return slow_ranks

    def investigate(
        self,
        verdict: Verdict,
        *,
        cause: str | None = None,
        pids: Mapping[int, int] | None = None,
        seconds: float = 0.5,
    ) -> Case:
        """Ask this machine's ranks for stacks and collectives, and find out what caused a fault.

        Args:
            verdict: the fault.
            cause: the cause as far as known, such as the signal that killed a rank; None derives it
                from ``verdict``.
            pids: the processes to ask, by rank; see `look`.
            seconds: the longest time to wait for the ranks' answers.
        """
        board = self._records(RING, pids)
        states = process_states(record.pid for record in board)
        running = {
            record.rank: record.pid
            for record in board
            if states[record.pid] != GONE and not states[record.pid].stopped
        }
        evidence = collect(self.folder, running, seconds)
        gone = [record.rank for record in board if record.rank not in running]
        evidence |= {rank: Evidence.of_crash(self.folder, rank) for rank in gone}
        blamed = blame(board, evidence, states)
        if verdict.fault is Fault.DEAD and set(blamed.ranks) != set(verdict.ranks):
            blamed = replace(blamed, ranks=verdict.ranks, reason="has ended")
        return Case(
            cause=cause or ("hang" if verdict.fault is Fault.HANG else "ended"),
            blame=blamed,
            board=board,
            now=time.monotonic(),
            evidence=evidence,
            states=states,
            resident=dict(self.resident),
        )


def open_watcher(folder: Path | None, num_ranks: int, minutes: float) -> Watcher | None:
    """Return a watcher; None without a host folder, or without enough memory for the `Board`.

    ``minutes`` is the longest silence in phases without a usual length.
    """
    try:
        limits = Limits(boundless=60.0 * minutes)
        return None if folder is None else Watcher(folder, num_ranks, limits)
    except OSError:
        return None
