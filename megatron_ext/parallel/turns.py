"""Two functions in turns on one rank: one computes while the other's communication is under way.

A forward pass of one micro-batch and a backward pass of another know nothing of each other, and
neither can be left and entered again halfway. So each runs on a thread of its own, and gives up its
turn where it would wait for communication that it has started. Only one of the two threads runs at
any time, so the operations of a rank, collectives included, always have the same order.

Nothing is split or cut for this: each pass computes what it would compute alone, in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from megatron.core.tensor_parallel.random import _get_all_rng_states, _set_all_rng_states

Job = Callable[[], object]


def _ignore(_own: bool) -> None:
    """Do nothing at the begin of a turn."""


class _Left(BaseException):
    """Ends the function on the other thread after the caller's function has failed."""


class _Pair:
    """Two functions that run in turns; index 0 is the caller's, index 1 runs on the other thread.

    Attributes:
        current: index of the function whose turn it is.
        owes: whether each function has yet to give way before its next communication.
    """

    def __init__(self, took_turn: Callable[[bool], None]) -> None:
        self.current = 0
        self.took_turn = took_turn
        self.owes = [False, False]
        self.gates = (threading.Semaphore(0), threading.Semaphore(0))
        self.has_ended = [False, False]
        self.error: BaseException | None = None

    def switch(self) -> None:
        """Let the other function go on, and return when it is the caller's turn again."""
        own = self.current
        self.current = 1 - own
        self.gates[1 - own].release()
        self.await_turn(own)

    def await_turn(self, index: int) -> None:
        """Return when it is the turn of the function with this index."""
        self.gates[index].acquire()
        self.took_turn(index == 0)

    def end(self) -> None:
        """Let the other function go on to its end; the caller's function has ended."""
        self.has_ended[self.current] = True
        self.current = 1 - self.current
        self.gates[self.current].release()


class Turns:
    """Runs pairs of functions in turns.

    Args:
        keeps_random_states: whether each function of a pair has random states of its own. A
            backward pass that recomputes layers sets states which the forward pass must not see.
        releases_early: whether the backward pass of a layer's attention, which frees its
            activations, comes before the forward pass of the other micro-batch's experts.
    """

    def __init__(self, *, keeps_random_states: bool = False, releases_early: bool = False) -> None:
        self.keeps_random_states = keeps_random_states
        self.releases_early = releases_early
        self._pair: _Pair | None = None
        self._jobs: SimpleQueue[Job | None] | None = None

    def __deepcopy__(self, _memo: Any) -> Turns:
        """Return this object: modules that copy their configuration must share its turns."""
        return self

    def run(self, other: Job, own: Job, *, took_turn: Callable[[bool], None] = _ignore) -> None:
        """Run ``other`` on another thread, and ``own`` on this one, in turns; ``other`` begins.

        The random states afterwards are those that ``own`` leaves. An error of either function ends
        both, and is raised here.

        Args:
            took_turn: called at the begin of each turn with True if it is that of ``own``.
        """
        pair = self._pair = _Pair(took_turn)
        device = torch.cuda.current_device()
        stream = torch.cuda.current_stream()

        def job() -> None:
            pair.await_turn(1)
            try:
                torch.cuda.set_device(device)
                with torch.cuda.stream(stream):
                    other()
            except _Left:
                pass
            except BaseException as error:
                pair.error = error
            finally:
                pair.end()

        self._submit(job)
        try:
            self.give_way()
            own()
            states = self._states()
            if not pair.has_ended[1]:
                pair.end()
                pair.await_turn(0)
            if pair.error is not None:
                raise pair.error
            self._restore(states)
        except BaseException:
            # If the other function hangs in a collective, its thread is left to itself.
            self._jobs = None
            if pair.current == 0:
                pair.error = _Left()
                pair.end()
            raise
        finally:
            self._pair = None

    def give_way(self) -> None:
        """Let the other function of a running pair go on until it gives way or ends.

        Call this between the start of a communication and the wait for it. Outside a pair, or if
        the other function has ended, do nothing.

        Raises:
            BaseException: the error of the other function, which ends this one.
        """
        pair = self._pair
        if pair is None or pair.has_ended[1 - pair.current]:
            return
        states = self._states()
        pair.switch()
        if pair.error is not None:
            raise pair.error
        self._restore(states)

    def give_way_later(self) -> None:
        """Give way only before the next communication (`give_way_if_owed`), not now."""
        if self._pair is not None:
            self._pair.owes[self._pair.current] = True

    def give_way_if_owed(self) -> None:
        """Give way if `give_way_later` was called since the last turn of the caller's function."""
        pair = self._pair
        if pair is not None and pair.owes[pair.current]:
            pair.owes[pair.current] = False
            self.give_way()

    def _states(self) -> Any:
        return _get_all_rng_states() if self.keeps_random_states else None

    def _restore(self, states: Any) -> None:
        if states is not None:
            _set_all_rng_states(*states)

    def _submit(self, job: Job) -> None:
        """Give a job to the other thread; start the thread if there is none.

        The thread serves all pairs, since a new one would need new threads of OpenMP, too.
        """
        if self._jobs is None:
            jobs = self._jobs = SimpleQueue()
            threading.Thread(target=_serve, args=(jobs,), name="backward", daemon=True).start()
            weakref.finalize(self, jobs.put, None)
        self._jobs.put(job)


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        job()
        del job  # or its tensors live until the next one
