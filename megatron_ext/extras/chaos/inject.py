"""Injects faults into a running rank, to test how the run survives them; there is no flag for it.

``tools/chaos.py`` and tests set the environment variable MEGATRON_EXT_FAULTS. It holds JSON: a list
of faults, or ``{"folder": ..., "faults": [...]}``. With a folder, each fault happens only once over
all restarts. A file in the folder then says when, where and what the fault struck; another file
lists the steps that each rank has begun. Without the variable nothing happens.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from megatron_ext.disk.host_folder import generation, host_folder
from megatron_ext.disk.writing import open_to_append, write_text
from megatron_ext.extras.chaos.strikes import FROM_ANY_THREAD, STRIKES, Target, watch_fsync
from megatron_ext.parallel.recorder import Recorder
from megatron_ext.train.pretrain import INJECTED as VARIABLE

SLOW = "slow rank"
KINDS = (*STRIKES, SLOW)
_SECONDS_OF_A_SLOW_PASS = 0.05
_COMPUTED = {"F": "forward", "B": "backward", "W": "backward", "FB": "forward"}
"""Names in events such as "end of forward", by the schedule's letter for a computation (W: the
gradients of weights; FB: a pair of two passes, which counts as its forward pass).
"""


@dataclass(frozen=True)
class Fault:
    """A fault to inject, and when and where it happens.

    Attributes:
        kind: one of `KINDS`.
        iteration: the first step in which the fault may happen, counted from 1. The fault happens
            at the first event ``at`` from that step on.
        rank: the rank to strike; None draws one with ``seed``.
        at: the name of the event at which the fault happens: an event of a `Recorder`, such as
            "data", "update" or "save"; or an action of the pipeline schedule, such as "forward" (of
            any micro-batch), "forward of micro-batch 1" or "end of backward"; or "start", before
            the model is built, with ``iteration`` 0.
        seconds: delay from the event to the fault.
        generation: the fault happens only after exactly this many restarts; None for any number.
        amount: strength of the fault; for a slow rank, the seconds added to each forward pass.
        steps: for how many steps a rank stays slow, or a disk stays full.
    """

    kind: str
    iteration: int
    rank: int | None = None
    at: str = "step"
    seconds: float = 0.0
    generation: int | None = 0
    seed: int = 0
    amount: float | None = None
    steps: int = 3


def as_variable(faults: Sequence[Fault], folder: Path | None = None) -> dict[str, str]:
    """Return name and value of the environment variable that injects faults into a run's ranks.

    With a ``folder`` for records, each fault happens only once over all restarts of the run.
    """
    listed = [dataclasses.asdict(fault) for fault in faults]
    given = listed if folder is None else {"folder": str(folder), "faults": listed}
    return {VARIABLE: json.dumps(given)}


def name_of_event(name: str, detail: Any) -> str:
    """Return the name by which `Fault.at` refers to an event.

    The rank's `Recorder` passes the event's ``name`` and ``detail`` to its listeners. The detail
    "end" gives a result such as "end of backward", and an action of the pipeline schedule one such
    as "forward of micro-batch 1".
    """
    kind = getattr(detail, "kind", None)
    microbatch = getattr(detail, "microbatch", None)
    if kind is None or microbatch is None:
        return f"end of {_COMPUTED.get(name, name)}" if detail == "end" else name
    words = {"INPUT": "backward", "WEIGHT": "backward", "PAIR": "forward"}
    word = words.get(kind.name, kind.name.lower().replace("_", " "))
    return f"{word} of micro-batch {microbatch}"


class Injector:
    """Listener of one rank's `Recorder`, which injects the faults that are meant for this rank.

    Args:
        faults: the faults for all ranks.
        generation: number of restarts of the run so far.
        folder: where faults and begun steps are recorded; None for no records.
        save, host: the attributes of `Target`.

    Attributes:
        chunks: the rank's model chunks, which the run sets once they are built.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        rank: int,
        world_size: int,
        generation: int = 0,
        folder: Path | None = None,
        save: Path | None = None,
        host: Path | None = None,
    ) -> None:
        self.chunks: Sequence[torch.nn.Module] = ()
        self._rank = rank
        self._generation = generation
        self._folder = folder
        self._save = save
        self._host = host
        self._waiting = [
            (index, fault)
            for index, fault in enumerate(faults)
            if rank == _rank_of(fault, world_size)
            and fault.generation in (None, generation)
            and not (folder is not None and record_file(folder, index).exists())
        ]
        self._due: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._undo_at = 0
        self._fsync_fails = watch_fsync()
        self._slow_until, self._delay = 0, 0.0

    def __call__(self, name: str, iteration: int, detail: Any = None) -> None:
        """Inject the faults that are due at an event; the arguments come from the `Recorder`."""
        if name == "step":
            self._begin_step(iteration)
        due, self._due = self._due, []
        for strike in due:
            strike()
        if not self._waiting and iteration >= self._slow_until:
            return
        event = name_of_event(name, detail)
        if iteration < self._slow_until and event.startswith("forward of"):
            time.sleep(self._delay)
        for entry in list(self._waiting):
            fault = entry[1]
            fits = event == fault.at or event.startswith(f"{fault.at} of micro-batch")
            if fits and iteration >= fault.iteration:
                self._waiting.remove(entry)
                self._start(*entry, iteration, event)

    def _begin_step(self, iteration: int) -> None:
        if self._undo and iteration >= self._undo_at:
            undo, self._undo = self._undo, []
            for action in undo:
                action()
        if self._folder is not None:
            row = {"time": time.time(), "generation": self._generation, "iteration": iteration}
            with open_to_append(steps_file(self._folder, self._rank)) as file:
                file.write(json.dumps(row) + "\n")

    def _start(self, index: int, fault: Fault, iteration: int, event: str) -> None:
        strike = partial(self._strike, index, fault, iteration, event)
        if not fault.seconds:
            strike()
            return
        now = strike if fault.kind in FROM_ANY_THREAD else lambda: self._due.append(strike)
        timer = threading.Timer(fault.seconds, now)
        timer.daemon = True
        timer.start()

    def _strike(self, index: int, fault: Fault, iteration: int, event: str) -> None:
        def note(text: str) -> None:
            if self._folder is None:
                return
            row = {"kind": fault.kind, "time": time.time(), "rank": self._rank, "event": event}
            row |= {"iteration": iteration, "generation": self._generation, "what": text}
            path = record_file(self._folder, index)
            aside = path.with_suffix(".tmp")
            write_text(aside, json.dumps(row))
            os.replace(aside, path)

        if fault.kind == SLOW:
            self._slow_until = iteration + fault.steps
            self._delay = fault.amount or _SECONDS_OF_A_SLOW_PASS
            note(f"{self._delay:g} s in each forward pass of {fault.steps} steps")
            return
        self._undo_at = iteration + fault.steps
        target = Target(
            note=note,
            random=Random(fault.seed),
            save=self._save,
            host=self._host,
            chunks=self.chunks,
            fsync_fails=self._fsync_fails,
            undo=self._undo,
        )
        STRIKES[fault.kind](target)


def arm(recorder: Recorder, save: str | None) -> Injector | None:
    """Read faults from the environment variable, and let them happen at events of this rank.

    Return the listener that was added to ``recorder``; None if the variable is not set. Faults can
    also strike processes that the rank forks later. ``save`` is the run's save folder, if any.
    """
    if VARIABLE not in os.environ:
        return None
    given = json.loads(os.environ[VARIABLE])
    folder = None
    if isinstance(given, dict):
        folder = Path(given["folder"])
        given = given["faults"]
    injector = Injector(
        [Fault(**row) for row in given],
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        generation=generation(),
        folder=folder,
        save=None if save is None else Path(save),
        host=host_folder(),
    )
    recorder.listeners.append(injector)
    injector("start", 0)
    return injector


def _rank_of(fault: Fault, world_size: int) -> int:
    return fault.rank if fault.rank is not None else Random(fault.seed).randrange(world_size)


def record_file(folder: Path, index: int) -> Path:
    """Return the path of the file that describes a fault of the list once it has happened."""
    return folder / f"fault_{index:03d}.json"


def steps_file(folder: Path, rank: int) -> Path:
    """Return the path of the file with a line for each step that a rank has begun."""
    return folder / f"steps_{rank:03d}.txt"
