"""Draws when a rank of a run is killed, and tells whether the run has noticed it and cleaned up."""

import json
import random
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.files import folder_of
from megatron_ext.checkpoint.run_record import RECORD
from megatron_ext.disk.events import EVENTS_FILE, read_events
from megatron_ext.extras.chaos.inject import Fault, record_file
from megatron_ext.extras.chaos.plan import MOMENTS
from tests.combinations.draw import has

_START = "start"
_EVERY_MOMENT = (_START, *MOMENTS, "save", "end of save")
_SECONDS_OF_A_START = 0.5
_LEFT_BY_FAULTS = re.compile(rf"{re.escape(EVENTS_FILE)}|{re.escape(RECORD)}|postmortem_\d+")


def draw(seed: int, rows: Sequence[Mapping[str, Any]]) -> Fault:
    """Draw rank, step and moment of a kill in a run whose undisturbed twin has these rows.

    Half of the kills come some time after the begin of a phase, but hardly later than a step takes.
    """
    dice = random.Random(seed)
    at, step = dice.choice(_EVERY_MOMENT), dice.choice([row["iteration"] for row in rows])
    seconds = statistics.median(row["seconds_per_iteration"] for row in rows)
    if at == _START:
        step, seconds = 0, _SECONDS_OF_A_START
    later = dice.uniform(0, seconds) if dice.random() < 0.5 else 0.0
    return Fault("SIGKILL", step, at=at, seconds=later, seed=seed)


def flags(seed: int, words: Sequence[str]) -> list[str]:
    """Return the flags with which a run is killed, beside its own: it may be restarted.

    Two of three runs keep snapshots in memory; the others go on from a checkpoint or the start.
    """
    found = [] if has(words, "max_restarts") else ["--max-restarts", "2"]
    if not has(words, "peer_checkpoint_interval") and seed % 3:
        found += ["--peer-checkpoint-interval", "1"]
    return found


def problems(records: Path, undisturbed: Path, killed: Path) -> list[str]:
    """Return what is wrong about a run that was killed, but for its numbers, as sentences.

    Args:
        records: the folder in which the injected fault has noted what it struck.
        undisturbed: the save folder of the run without a fault.
        killed: the save folder of the run that was killed.
    """
    return [*_untold(records, killed), *_left(undisturbed, killed)]


def _untold(records: Path, killed: Path) -> Iterator[str]:
    struck = json.loads(record_file(records, 0).read_text(encoding="utf-8"))
    faults = [event for event in read_events(killed) if event["kind"] == "fault"]
    told = [(event["rank"], event["cause"]) for event in faults]
    if told != [(struck["rank"], "SIGKILL")]:
        yield f"rank {struck['rank']} was killed, but (rank, cause) of the events are {told}"


def _left(undisturbed: Path, killed: Path) -> Iterator[str]:
    before, after = ({path.name for path in x.iterdir()} for x in (undisturbed, killed))
    expected = {folder_of(killed, made_up).name for made_up in _made_up(before - after, killed)}
    for name in sorted(after - before - expected):
        if not _LEFT_BY_FAULTS.fullmatch(name):
            yield f"{name} is left in the save folder"


def _made_up(lost: Collection[str], killed: Path) -> Iterator[int]:
    """Yield the iteration of the save that makes up for a lost one, if there is such a save.

    A run that goes on from a snapshot saves at once if the kill has interrupted an earlier save.

    Args:
        lost: names in the undisturbed run's save folder that the killed run's folder lacks.
        killed: the save folder of the run that was killed.
    """
    source, restored = restart_of(killed)
    earlier = {folder_of(killed, iteration).name for iteration in range(restored)}
    if source in ("memory", "peer") and earlier & set(lost):
        yield restored


def restart_of(killed: Path) -> tuple[str, int]:
    """Return what a run went on from after its restart, and the iteration of that state.

    A run that had no step left tells no restart, and no iteration either.
    """
    restarts = [event for event in read_events(killed) if event["kind"] == "restart"]
    if not restarts:
        return "the end", 0
    return restarts[-1]["restored_from"], restarts[-1]["restored_iteration"]
