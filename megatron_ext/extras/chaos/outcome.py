"""Checks for each injected fault that the run noticed it, named it correctly, and lost nothing.

The truth is independent of the checked run: it comes from the records that injected faults leave,
from the steps that each rank has begun, and from an undisturbed run with the same flags.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.files import folder_of, read_tracker
from megatron_ext.checkpoint.unpickling import read_tensors, stored_entries
from megatron_ext.disk.events import read_events
from megatron_ext.disk.reading import read_json_object, rows_of
from megatron_ext.extras.chaos.inject import SLOW, Fault, record_file
from megatron_ext.extras.chaos.plan import Case
from megatron_ext.extras.chaos.run import Ended
from megatron_ext.train.reporting.files import read_metrics

Row = dict[str, Any]
TOLD: dict[str, tuple[str, tuple[str, ...]]] = {
    "SIGKILL": ("fault", ("SIGKILL",)),
    "SIGSTOP": ("fault", ("hang", "stopped")),
    "SIGSEGV": ("fault", ("SIGSEGV",)),
    "exception": ("fault", ("exception",)),
    "memory": ("fault", ("memory",)),
    "memory kill": ("fault", ("memory",)),
    "lost socket": ("fault", ("lost contact",)),
    "corrupt checkpoint": ("fault", ("SIGKILL",)),
    "slow rank": ("slow_rank", ()),
    "full disk": ("save_failed", ()),
    "failed fsync": ("save_failed", ()),
    "NaN gradient": ("non_finite", ()),
    "bit flip": ("mismatch", ()),
}
"""How a run must report each kind of fault in `faults.jsonl`: ``(kind of event, words)``, where the
event's ``cause`` must contain at least one of the words. Without words any cause is right.
"""
NAMES_NO_RANK = {"full disk", "failed fsync", "lost socket"}
"""Faults for which a run need not report the right rank: a lost connection has two ends, and a save
fails as a whole."""
RESTARTS = {kind for kind, (event, _) in TOLD.items() if event == "fault"}
"""Faults after which the run must restart."""
SECONDS_UNTIL_SLOWNESS_IS_TOLD = 50.0
"""Seconds after which a rank that stays slow must have been reported: the ranks' times are measured
every 15 seconds, and a rank must be slow in two consecutive measurements."""


@dataclass(frozen=True)
class Truth:
    """An undisturbed run: digests of its last checkpoint's tensors, its metrics by step, its times.

    ``step_seconds`` and ``save_seconds`` are medians; ``seconds`` is the time of the whole run.
    """

    digests: dict[str, str]
    rows: dict[int, Row]
    step_seconds: float
    seconds: float
    save_seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of one fault.

    Attributes:
        where: the rank, step and event of the fault; None if it did not happen.
        told: cause and rank reported by the run; None if it reported nothing.
        seen_after: seconds from the fault to the report.
        resumed_after, steps_lost: seconds to the next new step, and complete steps that the fault
            cost; None without a restart.
        restored_from: origin of the state after the restart, such as "checkpoint" or "memory".
        problems: sentences on what is wrong; empty if the run survived the fault as it must.
    """

    fault: Fault
    where: str | None = None
    told: str | None = None
    seen_after: float | None = None
    resumed_after: float | None = None
    steps_lost: int | None = None
    restored_from: str | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The outcome of a run with faults.

    Attributes:
        different: name of the first tensor in the last checkpoint that differs from the undisturbed
            run's; None if all are equal, or if the run failed.
        problems: sentences on what is wrong with the run as a whole.
        folder: folder of the run's log, records of faults, and save folder.
        seconds: time from the beginning of the first step to the end of the run.
    """

    case: Case
    ended: Ended
    outcomes: tuple[Outcome, ...]
    different: str | None
    problems: tuple[str, ...] = ()
    folder: Path | None = None
    seconds: float = 0.0

    @property
    def weights_equal(self) -> bool:
        """Return whether the run completed with the weights of the undisturbed run."""
        return self.ended.code == 0 and self.different is None

    @property
    def survived(self) -> bool:
        """Return whether nothing is wrong with the run and its faults."""
        return not self.problems and not any(outcome.problems for outcome in self.outcomes)


def digests(save: Path) -> dict[str, str]:
    """Return a digest of each tensor of the newest checkpoint, by name; {} without a checkpoint.

    The key ``iteration N`` is added, so that checkpoints of different steps are never equal.
    """
    iteration = read_tracker(save)
    if iteration is None:
        return {}
    path = folder_of(save, iteration)
    entries = stored_entries(path).items()
    names = sorted(name for name, entry in entries if isinstance(entry, TensorStorageMetadata))
    by_name = {f"iteration {iteration}": ""}
    with warnings.catch_warnings():
        # torch warns that it reads in a single process.
        warnings.simplefilter("ignore")
        tensors = read_tensors(path, names)
    for name, tensor in tensors.items():
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        by_name[name] = hashlib.blake2b(content, digest_size=16).hexdigest()
    return by_name


def steps_of(save: Path) -> dict[int, Row]:
    """Return a run's training metrics by step; a step that was repeated has its last ones."""
    rows = read_metrics(save / "metrics.jsonl")
    return {row["iteration"]: row for row in rows if row["kind"] == "train"}


def judge(
    case: Case, ended: Ended, save: Path, records: Path, truth: Truth, *, most_lost: int = 1
) -> Result:
    """Compare what a run reported and computed with the faults that were injected into it.

    Args:
        case: the faults and the layout of the run.
        ended: how the run ended.
        save: the run's folder of checkpoints and metrics.
        records: the folder in which the faults recorded themselves.
        truth: the undisturbed run.
        most_lost: the most steps that a fault may cost, unless it damages the checkpoint.
    """
    struck = [_read(record_file(records, index)) for index in range(len(case.faults))]
    events = read_events(save)
    begun = _begun(records)
    times = sorted(row["time"] for row in struck if row)
    outcomes = []
    for fault, row in zip(case.faults, struck, strict=True):
        if row is None:
            outcomes.append(Outcome(fault, problems=("it did not happen",)))
            continue
        until = min((time for time in times if time > row["time"]), default=float("inf"))
        later = [event for event in events if row["time"] <= event["time"]]
        outcomes.append(_outcome(fault, row, later, begun, until, most_lost))
    problems = _problems(ended)
    different = None
    if ended.code == 0:
        actual = digests(save)
        names = sorted(actual.keys() | truth.digests.keys())
        different = next((n for n in names if actual.get(n) != truth.digests.get(n)), None)
        if different is not None:
            problems.append(f"`{different}` differs from the undisturbed run's")
        problems += _other_losses(steps_of(save), truth.rows)
    seconds = ended.at - begun[0]["time"] if begun else 0.0
    return Result(case, ended, tuple(outcomes), different, tuple(problems), save.parent, seconds)


def _outcome(
    fault: Fault,
    row: Row,
    events: Sequence[Row],
    begun: list[Row],
    until: float,
    most_lost: int,
) -> Outcome:
    kind, causes = TOLD[fault.kind]
    mine = [event for event in events if event["time"] < until]
    telling = next((event for event in mine if event["kind"] == kind), None)
    # Another fault may occur before the restart is finished.
    restart = next((event for event in events if event["kind"] == "restart"), None)
    problems = []
    reported = seen = None
    if telling is None:
        if fault.kind != SLOW or _slow_for(fault, row, begun) > SECONDS_UNTIL_SLOWNESS_IS_TOLD:
            problems.append("it was not told")
    else:
        seen = telling["time"] - row["time"]
        cause = telling.get("cause", kind)
        rank = telling.get("rank")
        reported = str(cause) if rank is None else f"{cause} of rank {rank}"
        right = not causes or any(word in str(cause) for word in causes)
        right &= fault.kind in NAMES_NO_RANK or rank == row["rank"]
        if not right:
            problems.append(f"it was told as {reported}")
    if fault.kind == "corrupt checkpoint" and not _any(mine, "checkpoint_refused"):
        problems.append("the damaged checkpoint was not told")
    lost, resumed = _steps_lost(row, begun, until)
    restored = None if restart is None else restart.get("restored_from")
    if restart is not None:
        if fault.kind != "corrupt checkpoint" and (lost or 0) > most_lost:
            problems.append(f"{lost} steps were lost")
    elif fault.kind in RESTARTS:
        problems.append("no restart was told")
    where = f"rank {row['rank']}, step {row['iteration']}, {row['event']}"
    where += f" + {fault.seconds:.2f} s" if fault.seconds else ""
    return Outcome(fault, where, reported, seen, resumed, lost, restored, tuple(problems))


def _slow_for(fault: Fault, row: Row, begun: Sequence[Row]) -> float:
    """Return for how many seconds the rank that a fault slowed down stayed slow.

    ``row`` is the record of the fault; ``begun`` has a row for each step that the rank has begun.
    """
    end = fault.iteration + fault.steps
    slow = [s["time"] for s in begun if s["time"] >= row["time"] and s["iteration"] <= end]
    return max(slow, default=0.0) - float(row["time"])


def _any(events: Sequence[Row], kind: str) -> bool:
    return any(event["kind"] == kind for event in events)


def _steps_lost(row: Row, begun: Sequence[Row], until: float) -> tuple[int | None, float | None]:
    """Return how many complete steps a fault cost, and the seconds to the next new step.

    ``row`` is the record of the fault, ``begun`` has a row for each step that a rank has begun, and
    ``until`` is the time of the next fault. A step is complete once a rank has begun the next one.
    The next new step ends when a step begins that no rank had begun before the fault; the seconds
    are None if none does before ``until``. Both are None if no step begins after a restart.
    """
    before = [step for step in begun if step["time"] <= row["time"]]
    after = [step for step in begun if row["time"] < step["time"] < until]
    again = [step for step in after if step["generation"] > row["generation"]]
    if not before or not again:
        return None, None
    reached = max(step["iteration"] for step in before)
    in_this = [s for s in after if s["generation"] == row["generation"]]
    reached = max([reached, *(step["iteration"] for step in in_this)])
    first = min(step["iteration"] for step in again)
    new = [step["time"] for step in again if step["iteration"] > reached]
    return reached - first, min(new) - row["time"] if new else None


def _begun(records: Path) -> list[Row]:
    rows = list[Row]()
    for path in records.glob("steps_*.txt"):
        rows += rows_of(path, lambda row: "time" in row)
    return sorted(rows, key=lambda row: float(row["time"]))


def _read(path: Path) -> Row | None:
    return read_json_object(path) if path.is_file() else None


def _problems(ended: Ended) -> list[str]:
    problems = []
    if ended.code is None:
        problems.append(f"the run hung and was ended after {ended.seconds:.0f} s")
    elif ended.code != 0:
        problems.append(f"the run ended with exit code {ended.code}")
    if ended.left:
        problems.append(f"{len(ended.left)} processes were left behind")
    return problems


def _other_losses(mine: dict[int, Row], truth: dict[int, Row]) -> list[str]:
    """Return a sentence on the first step with a loss or gradient norm other than in ``truth``.

    Both arguments are training metrics by step. The list is empty if all are equal.
    """
    for iteration, want in sorted(truth.items()):
        row = mine.get(iteration)
        if row is None:
            return [f"metrics.jsonl has no row of step {iteration}"]
        for name in ("lm loss", "grad_norm"):
            if name in want and row.get(name) != want[name]:
                return [f"the {name} of step {iteration} is {row.get(name)}, not {want[name]}"]
    return []
