"""Decides which ranks are dead or hang, from the board (`parallel.board`) and process states.

A run hangs if no rank has written an event for as long as two steps take, but at least for a
minimum time. Phases without a usual length, such as a save, have a separate limit. These functions
only compute: all observations are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from megatron_ext.extras.resilience.process import GONE, ProcessState
from megatron_ext.parallel.board import BOUNDLESS, RankRecord


class Fault(Enum):
    """Kinds of faults of a rank."""

    DEAD = "dead"
    HANG = "hang"


@dataclass(frozen=True)
class Limits:
    """How long a run may be silent before it counts as hanging.

    Attributes:
        floor: seconds of silence that never count as a hang.
        steps: number of step times after which silence counts as a hang.
        busy: factor by which the limit is longer while a rank computes or reads data, since its
            step may just be long, or its storage slow.
        boundless: limit in seconds for phases without a usual length, such as a save.
    """

    floor: float = 5.0
    steps: float = 2.0
    busy: float = 5.0
    boundless: float = 600.0


USUAL = Limits()


@dataclass(frozen=True)
class Verdict:
    """A fault, detected by `verdicts` or by the launcher's process that supervises the ranks.

    Attributes:
        ranks: ranks that have ended, or that are stopped by a signal. For any other hang this is
            empty, until `waits.blame` finds the rank that stopped first.
        silent: seconds of silence. For a hang: the time since the last event of any running rank,
            or the timeout that has passed. For an ended rank: the time since its own last event, or
            0 if the fault was seen by its exit code.
    """

    fault: Fault
    ranks: tuple[int, ...]
    silent: float


def verdicts(
    board: Sequence[RankRecord],
    now: float,
    states: Mapping[int, ProcessState],
    limits: Limits = USUAL,
    busy: bool = False,
) -> list[Verdict]:
    """Return the faults that ranks' records show at time ``now`` of CLOCK_MONOTONIC.

    Args:
        board: what each rank of this machine has recorded in shared memory (`parallel.board`).
        states: states of the ranks' processes, by process id; a missing process is not judged.
        busy: whether any rank has been using the processor for most of the silence.
    """
    running = [record for record in board if not record.ended]
    dead = [record for record in running if states.get(record.pid, ProcessState()) == GONE]
    faults = [Verdict(Fault.DEAD, (each.rank,), now - each.last_time) for each in dead]
    waiting = [record for record in running if record not in dead]
    if dead or not waiting:
        return faults
    silent = now - max(record.last_time for record in waiting)
    stopped = [record for record in waiting if states.get(record.pid, ProcessState()).stopped]
    if silent > limit_of(waiting, stopped, limits, busy=busy):
        ranks = tuple(record.rank for record in stopped)
        faults.append(Verdict(Fault.HANG, ranks, silent))
    return faults


def limit_of(
    running: Sequence[RankRecord], stopped: Sequence[RankRecord], limits: Limits, *, busy: bool
) -> float:
    """Return the seconds of silence after which the ranks count as hanging.

    The limit is longer if a ``running`` rank reads data, is in a phase without a usual length or in
    its first step, or if any rank is ``busy`` computing. With ranks that a signal has ``stopped``
    it is never longer, since the others may just wait for those.
    """
    usual = max((record.mean_step for record in running), default=0.0)
    limit = max(limits.floor, limits.steps * usual)
    if stopped:
        return limit
    if any(record.phase in BOUNDLESS or record.steps < 2 for record in running):
        return max(limits.boundless, limit)
    reads = any(record.phase == "data" for record in running)
    return limit * limits.busy if busy or reads else limit
