"""The post-mortem of a fault, as files: which rank stopped first, where, and who waits for whom.

It is written during a recovery and must not disturb it: parts that cannot be written are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

import megatron_ext
from megatron_ext.disk.events import REPORT, TIMELINE
from megatron_ext.disk.writing import write_text
from megatron_ext.extras.resilience.process import GONE, ProcessState, gibibytes
from megatron_ext.extras.resilience.waits import Blame, Frame, Wait, main_stack
from megatron_ext.extras.resilience.watchdog import Evidence
from megatron_ext.parallel.board import Event, EventKind, RankRecord

_HOME = str(Path(megatron_ext.__file__).parent)
_SECONDS_FOR_DRAWING = 20.0
_OUTSIDE = ("/site-packages/", "/lib/python", "<frozen ")


@dataclass(frozen=True)
class Case:
    """Everything that is known about a fault.

    Attributes:
        cause: one or two words, such as "hang", "SIGKILL", "memory" or "exception".
        blame: the ranks that stopped first, and why.
        board: what each rank of this machine has recorded in shared memory (`parallel.board`).
        now: when the fault was detected, in seconds of CLOCK_MONOTONIC.
        evidence: stacks and latest collectives, by rank.
        states: states of the processes, by process id.
        resident: last known bytes in main memory, by rank.
    """

    cause: str
    blame: Blame
    board: Sequence[RankRecord]
    now: float
    evidence: Mapping[int, Evidence] = field(default_factory=dict)
    states: Mapping[int, ProcessState] = field(default_factory=dict)
    resident: Mapping[int, int] = field(default_factory=dict)

    def record(self, rank: int) -> RankRecord | None:
        """Return the record of a rank in ``board``; None for a rank of another machine."""
        return next((record for record in self.board if record.rank == rank), None)

    @property
    def sentence(self) -> str:
        """Return a sentence that says which rank stopped first, why, and where."""
        if not self.blame.ranks:
            return f"Nothing tells which rank stopped first ({self.cause})."
        first = self.blame.ranks[0]
        others = [str(rank) for rank in self.blame.ranks[1:]]
        also = f" (and rank {', '.join(others)})" if others else ""
        return f"Rank {first}{also} stopped first: it {self._why(first)}, {self.where(first)}."

    def _why(self, rank: int) -> str:
        if self.cause == "memory":
            resident = self.resident.get(rank)
            size = f"; it last held {gibibytes(resident)}" if resident else ""
            return f"was killed by the kernel for want of memory{size}"
        if self.cause.startswith("SIG"):
            return f"was ended by {self.cause}"
        return self.blame.reason

    def where(self, rank: int) -> str:
        """Return a text on what a rank was doing: step, phase, action, collective, line of code."""
        record = self.record(rank)
        if record is None:
            return "of which this machine knows no more"
        parts = [f"in step {record.iteration}" if record.iteration else "before the first step"]
        parts.append(f"phase {record.phase}")
        if action := _action(record):
            parts.append(action)
        evidence = self.evidence.get(rank, Evidence())
        wait = next((wait for wait in self.blame.waits if wait.rank == rank), None)
        if wait is not None and wait.what not in parts[-1]:
            parts.append(f"in {wait.what}")
        elif wait is None and evidence.flight and not evidence.flight[-1].over:
            parts.append(f"in {evidence.flight[-1]}")
        if frame := _frame_of_ours(evidence):
            parts.append(f"at {frame}")
        parts.append(f"{self.now - record.last_time:.1f} s after its last event")
        return ", ".join(parts)


def _action(record: RankRecord) -> str:
    """Return a text that names the pipeline action that a rank is in or has just ended.

    An action is, for example, the forward pass of a micro-batch through a stage. The text is "" if
    the rank has begun no action in this step.
    """
    later: list[Event] = []
    for event in reversed(record.events):
        if event.iteration != record.iteration or event.kind is EventKind.STEP:
            break
        if event.microbatch >= 0:
            name = f"{event.name} of micro-batch {event.microbatch}, stage {event.stage}"
            ended = any(e.kind is EventKind.END and e.name == event.name for e in later)
            return f"after {name}" if ended else name
        later.append(event)
    return ""


def _frame_of_ours(evidence: Evidence) -> Frame | None:
    """Return the innermost frame of a rank's stack that is in this package or the user's code.

    If there is none, return the innermost frame of all; return None if the stack is unknown.
    """
    stack = main_stack(evidence.stack or evidence.crash)
    ours = (frame for frame in stack if not any(place in frame.file for place in _OUTSIDE))
    return next(ours, stack[0] if stack else None)


def report(case: Case) -> str:
    """Return the report on a fault: its cause, who waits for whom, and the stacks of ranks."""
    lines = [case.sentence, "", "Who waits for whom:"]
    lines += [f"  {_wait_line(wait)}" for wait in case.blame.waits] or ["  nobody, as far as told"]
    lines += ["", "Ranks:"]
    lines += [f"  {_rank_line(case, record)}" for record in case.board]
    for record in case.board:
        evidence = case.evidence.get(record.rank, Evidence())
        lines += ["", f"Stacks of rank {record.rank}:", _stacks(case, record, evidence)]
    return "\n".join(lines) + "\n"


def _wait_line(wait: Wait) -> str:
    if not wait.on:
        return f"rank {wait.rank} waits in {wait.what}, to which all have come"
    others = ", ".join(map(str, wait.on))
    passed = ", in vain: it has gone on" if wait.passed else ""
    return f"rank {wait.rank} waits for rank {others}: {wait.what}{passed}"


def _rank_line(case: Case, record: RankRecord) -> str:
    state = case.states.get(record.pid, ProcessState())
    how = "ended" if state == GONE else "stopped" if state.stopped else "alive"
    resident = case.resident.get(record.rank)
    memory = f", {gibibytes(resident)}" if resident else ""
    return f"rank {record.rank} (pid {record.pid}, {how}{memory}): {case.where(record.rank)}"


def _stacks(case: Case, record: RankRecord, evidence: Evidence) -> str:
    if evidence.stack or evidence.crash:
        return (evidence.stack or evidence.crash).rstrip()
    state = case.states.get(record.pid, ProcessState())
    if state == GONE:
        return "none: the process has ended"
    return "none: a stopped process cannot answer" if state.stopped else "none: it did not answer"


def write_postmortem(case: Case, save: str | Path | None) -> Path | None:
    """Write a fault's report to a new folder ``postmortem_<n>`` in ``save``; return the folder.

    Without a save folder, or if the report cannot be written, print its first lines and return
    None.
    """
    text = report(case)
    if save is not None:
        with suppress(OSError):
            folder = _new_folder(Path(save))
            write_text(folder / REPORT, text)
            write_text(folder / TIMELINE, json.dumps(_timeline(case)))
            for rank, evidence in case.evidence.items():
                if evidence.flight:
                    entries = [asdict(entry) for entry in evidence.flight]
                    path = folder / f"collectives_{rank}.json"
                    write_text(path, json.dumps(entries))
            return folder
    print("\n".join(_head(text)), file=sys.stderr, flush=True)
    return None


def _head(text: str) -> list[str]:
    """Return the lines of a `report` up to the stacks of the ranks."""
    return text.partition("\n\nStacks of rank")[0].splitlines()


def _new_folder(save: Path) -> Path:
    save.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = save / f"postmortem_{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError


def _timeline(case: Case) -> dict[str, object]:
    """Return what timeline.json holds: the events of each rank.

    Times are in seconds relative to the detection of the fault, before which they are negative.
    """
    return {
        "title": case.sentence,
        "ranks": [
            {
                "rank": record.rank,
                "first": record.rank in case.blame.ranks,
                "events": [
                    [round(e.time - case.now, 6), e.kind.name, e.name, e.phase, e.iteration]
                    for e in record.events
                ],
            }
            for record in case.board
        ],
    }


class Drawings:
    """The helper processes that draw, for each fault of a run, the ranks' last events."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, folder: Path | None) -> None:
        """Start drawing a picture into ``folder``, which holds a report; None draws nothing."""
        if folder is not None and (process := start_drawing(folder)) is not None:
            self._processes.append(process)

    def wait(self) -> None:
        """Wait until all pictures are drawn, each up to a time limit."""
        for process in self._processes:
            try:
                process.wait(_SECONDS_FOR_DRAWING)
            except subprocess.TimeoutExpired:
                # The helper ends by itself, and Python must not warn that nothing has waited for
                # it.
                process.returncode = 0


def start_drawing(folder: Path) -> subprocess.Popen[bytes] | None:
    """Start a helper process that draws a picture into a report's ``folder``; return the process.

    It has low priority, so that drawing does not delay a restart. Return None if it cannot start.
    """
    command = [sys.executable, "-m", "megatron_ext.extras.resilience.picture", str(folder)]
    given = {"cwd": Path(_HOME).parent, "stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with suppress(OSError):
        return subprocess.Popen(["nice", "-n", "19", *command], start_new_session=True, **given)  # type: ignore[call-overload, no-any-return]
    return None
