"""Records a rank's phases, actions and steps as they happen, and adds up the time of each phase.

An event costs about a microsecond. Only the main thread of a rank may record.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from megatron_ext.disk.host_folder import generation, host_folder
from megatron_ext.parallel.board import (
    BOUNDLESS,
    MAX_NAMES,
    OTHER,
    PHASES,
    START,
    Board,
    EventKind,
    Slot,
    Word,
)

Listener = Callable[[str, int, Any], None]
"""A function ``(name, iteration, detail)`` that is called after each event has been recorded.

``name`` is as in `Event`. ``detail`` is None for a step or a mark, the `Action` when an action
begins, and otherwise "begin" or "end".
"""
_WHOLE = frozenset({PHASES.index("save"), PHASES.index("evaluate")})
"""Phases that also count the time of phases nested in them, which then do not count it."""
_NO_DETAIL = (-1, -1, -1)
_PHASE_OF = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "FB": "backward"}
"""The phase of each kind of computation; I and W are the gradients of input and weights.

FB is a pair of a forward and a backward pass, which says itself which of them runs
(`Recorder.charge_to`). All other kinds of actions are messages, whose phase is "bubble".
"""


class _Kind(Protocol):
    @property
    def value(self) -> str: ...


class Action(Protocol):
    """An item of a pipeline schedule's plan: a computation, a send or a receive of a rank."""

    @property
    def kind(self) -> _Kind: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def stage(self) -> int: ...


class Recorder:
    """Records what a rank does.

    With a ``slot`` of a `Board`, events are written to shared memory, where other processes can
    read them. Without one, they are passed only to the listeners and counted in `seconds`.

    Attributes:
        iteration: step that the rank is in, 0 before the first.
        listeners: functions that are called at each event.
    """

    def __init__(self, slot: Slot | None = None) -> None:
        self.iteration = 0
        self.listeners: list[Listener] = []
        self._slot = slot
        self._ids: dict[str, int] = {}
        self._phases: dict[str, _Phase] = {}
        self._nanoseconds = [0] * MAX_NAMES
        self._since = self._step_began = time.monotonic_ns()
        self._boundless_at_step = self._steps = self._mean_step = 0
        if slot is not None:
            slot.clear()
        for name in PHASES:
            self._id(name)
        self._charged = [self._ids[START]]
        self._scope = _ActionScope(self)

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each phase so far; they add up to the time since the start.

        Time in nested phases counts only for the innermost one, but all time within "save" or
        "evaluate" counts for these, not for phases nested in them.
        """
        self._charge(time.monotonic_ns())
        names = {number: name for name, number in self._ids.items()}
        return {names[i]: ns / 1e9 for i, ns in enumerate(self._nanoseconds) if ns}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time is recorded as phase ``name``; phases may be nested."""
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase(self, name, self._id(name))
        return phase

    def action(self, action: Action, peer: int | None = None) -> AbstractContextManager[None]:
        """Return a context that records an action of a pipeline schedule, and times it as a phase.

        The phase is "forward" or "backward" for a computation, "bubble" for a message. ``peer`` is
        the global rank at a message's other end, else None. Actions must not be nested.
        """
        self._scope.action = action
        self._scope.peer = -1 if peer is None else peer
        return self._scope

    def charge_to(self, name: str) -> None:
        """Add the time from now on to phase ``name``, in place of the innermost phase's."""
        self._charge(time.monotonic_ns())
        if self._charged[-1] not in _WHOLE:
            self._charged[-1] = self._ids[name]

    def waiting(
        self, kind: str, microbatch: int, stage: int, peer: int
    ) -> AbstractContextManager[None]:
        """Return a context in which the rank waits until a message has been sent or received.

        The time is recorded as phase "bubble". ``kind`` is the message's kind of action, such as
        "receive input"; ``peer`` is the global rank at its other end.
        """
        return _Waiting(self, kind, (microbatch, stage, peer))

    def step(self, iteration: int) -> None:
        """Record the beginning of step ``iteration``."""
        now = time.monotonic_ns()
        self._charge(now)
        if self._charged[0] != 0:
            self._charged[0] = self._ids[OTHER]
        boundless = sum(self._nanoseconds[self._ids[name]] for name in BOUNDLESS)
        if self._steps:
            took = now - self._step_began - (boundless - self._boundless_at_step)
            self._mean_step += (took - self._mean_step) // min(self._steps, 16)
        self._step_began = now
        self._boundless_at_step = boundless
        self._steps += 1
        self.iteration = iteration
        if self._slot is not None:
            self._slot.set(Word.STEP_TIME, self._mean_step)
            self._slot.set(Word.STEPS, self._steps)
            self._slot.set(Word.ITERATION, iteration)
        self._event(EventKind.STEP, "step", now, _NO_DETAIL, None)

    def mark(self, name: str) -> None:
        """Record an event called ``name`` that happens now and has no duration."""
        self._event(EventKind.MARK, name, time.monotonic_ns(), _NO_DETAIL, None)

    def place(self, rank: int, world_size: int, pipeline_rank: int) -> None:
        """Write the rank number, world size and pipeline rank to the slot, if there is one."""
        if self._slot is not None:
            self._slot.set(Word.RANK, rank)
            self._slot.set(Word.WORLD_SIZE, world_size)
            self._slot.set(Word.PIPELINE_RANK, pipeline_rank)

    def close(self) -> None:
        """Note in the slot, if there is one, that the run is over on this rank."""
        if self._slot is not None:
            self.mark("end")
            self._slot.set(Word.ENDED, 1)

    def _id(self, name: str) -> int:
        """Return the number that stands for ``name`` in events; a new name gets the next one.

        There are only `MAX_NAMES` numbers; when none is free, all further names share the last one.
        """
        number = self._ids.get(name)
        if number is None:
            number = self._ids[name] = min(len(self._ids), MAX_NAMES - 1)
            if self._slot is not None:
                self._slot.name(number, name if number < MAX_NAMES - 1 else "...")
        return number

    def _charge(self, now: int) -> None:
        """Add the time since the last call, up to ``now`` (nanoseconds), to the current phase."""
        charged = self._charged[-1]
        self._nanoseconds[charged] += now - self._since
        self._since = now
        if self._slot is not None:
            self._slot.seconds[charged] = self._nanoseconds[charged] / 1e9

    def _enter(self, phase: int, name: str, about: tuple[int, int, int], detail: Any) -> None:
        """Begin the phase with number ``phase``, and record this as an event called ``name``.

        The slot gets ``about``, a (microbatch, stage, peer); listeners get ``detail`` instead.
        """
        now = time.monotonic_ns()
        self._charge(now)
        outer = self._charged[-1]
        self._charged.append(outer if outer in _WHOLE else phase)
        try:
            self._event(EventKind.BEGIN, name, now, about, detail)
        except BaseException as error:
            # A listener has failed. Its phase has no context that would end it, so end it here.
            self._leave(name, type(error))
            raise

    def _leave(self, name: str, error: type[BaseException] | None) -> None:
        """End the innermost phase, and record this as an event called ``name``.

        If an exception ends it, ``error`` is its type, and a mark with the type's name comes first.
        """
        now = time.monotonic_ns()
        if error is not None:
            self._event(EventKind.MARK, error.__name__, now, _NO_DETAIL, None)
        self._charge(now)
        self._charged.pop()
        self._event(EventKind.END, name, now, _NO_DETAIL, "end")

    def _event(
        self, kind: EventKind, name: str, now: int, about: tuple[int, int, int], detail: Any
    ) -> None:
        if self._slot is not None:
            code = self._id(name) << 2 | kind
            self._slot.write(now, self.iteration, code, self._charged[-1], about)
        for listener in self.listeners:
            listener(name, self.iteration, detail)


class _Phase(AbstractContextManager[None]):
    """The context that `Recorder.phase` returns; it can be entered again, even inside itself."""

    __slots__ = ("_name", "_number", "_recorder")

    def __init__(self, recorder: Recorder, name: str, number: int) -> None:
        self._recorder = recorder
        self._name = name
        self._number = number

    def __enter__(self) -> None:
        self._recorder._enter(self._number, self._name, _NO_DETAIL, "begin")

    def __exit__(
        self, error: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._recorder._leave(self._name, error)


class _ActionScope(AbstractContextManager[None]):
    """The context that `Recorder.action` returns: one object, which serves all actions in turn."""

    __slots__ = ("_name", "_recorder", "action", "peer")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._name = ""
        self.action: Action
        self.peer = -1

    def __enter__(self) -> None:
        action = self.action
        recorder = self._recorder
        self._name = name = action.kind.value
        phase = recorder._ids[_PHASE_OF.get(name, "bubble")]
        recorder._enter(phase, name, (action.microbatch, action.stage, self.peer), action)

    def __exit__(
        self, error: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._recorder._leave(self._name, error)


class _Waiting(AbstractContextManager[None]):
    """The context that `Recorder.waiting` returns, for one wait for a message."""

    __slots__ = ("_about", "_kind", "_recorder")

    def __init__(self, recorder: Recorder, kind: str, about: tuple[int, int, int]) -> None:
        self._recorder = recorder
        self._kind = f"wait: {kind}"
        self._about = about

    def __enter__(self) -> None:
        recorder = self._recorder
        recorder._enter(recorder._ids["bubble"], self._kind, self._about, "begin")

    def __exit__(
        self, error: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._recorder._leave(self._kind, error)


def open_recorder(folder: Path | None = None) -> Recorder:
    """Return a recorder that writes to this rank's slot of the `Board` in a host folder.

    ``folder`` is the host folder (see `disk.host_folder`), None for the run's. If the run has none,
    or memory for the board is lacking, return a recorder without a slot.
    """
    folder = folder or host_folder()
    if folder is None:
        return Recorder()
    place = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        slot = Board.of_machine(folder).slot(place)
    except OSError as error:
        if place == 0:
            print(f"note: no heartbeats, for the board cannot be made ({error})", flush=True)
        return Recorder()
    recorder = Recorder(slot)
    slot.set(Word.STARTED, time.monotonic_ns())
    slot.set(Word.GENERATION, generation())
    recorder.place(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), 0)
    # Write the process id last: a slot without a process id counts as free.
    slot.set(Word.PID, os.getpid())
    return recorder
