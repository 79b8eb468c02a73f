"""Tells how the saves of a run end, and lets the run go on where one fails."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from megatron_ext.disk.events import append_event
from megatron_ext.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_ext.checkpoint.background import BackgroundSaves


class Write(Protocol):
    """A function that saves the run, and waits for the files if told so."""

    def __call__(self, *, waits: bool) -> None: ...


class Saves:
    """The saves of a run, which are written at once or in the background.

    Attributes:
        num_failed: saves that failed, which all ranks know from the next save on.

    Args:
        folder: the save folder, whose list of events gets each save.
        rank: rank 0 tells what happens.
        tolerant: whether the run goes on after a failed save.
    """

    def __init__(
        self,
        folder: str | None,
        rank: int,
        *,
        background: BackgroundSaves | None = None,
        tolerant: bool = False,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._background = background
        self._tolerant = tolerant
        self._stalls: dict[int, float] = {}
        self._failed = 0
        self._newest_failed = False
        # Whether the newest save may have failed, and the failures that were known when it began.
        self._is_open, self._known = False, 0
        # Steps since the last save or look at it, and their number at the next look.
        self._steps, self._pause = 0, 1

    @property
    def num_failed(self) -> int:
        late = 0 if self._background is None else self._background.num_failed
        return self._failed + late

    def save(self, write: Write, iteration: int, is_last: bool) -> bool:
        """Save by ``write``, which is told whether to wait for the files; return if it worked.

        All ranks call this together.

        Raises:
            CheckpointError: the save failed, and the run may not go on without it.
        """
        started = time.perf_counter()
        self._is_open, self._steps = True, 0
        try:
            write(waits=False)
        except CheckpointError as error:
            self._failed += 1
            self._newest_failed = True
            self._known = self.num_failed
            self._tell_failure(iteration, str(error))
            if is_last or not self._tolerant:
                raise
            return False
        self._newest_failed = False
        if self.num_failed == self._known:
            self._pause = 1
        self._known = self.num_failed
        stall = time.perf_counter() - started
        if self._background is None:
            self._tell_success(iteration, stall)
        elif self._rank == 0:
            self._stalls[iteration] = stall
        return True

    def look(self) -> None:
        """Tell which saves in the background have ended since the last call."""
        if self._background is None:
            return
        for outcome in self._background.ended():
            stall = self._stalls.pop(outcome.iteration, 0.0)
            if outcome.reason:
                text = f"The checkpoint of iteration {outcome.iteration} could not be saved: "
                self._tell_failure(outcome.iteration, f"{text}{outcome.reason.rstrip('.')}.")
            else:
                self._tell_success(outcome.iteration, stall, outcome.seconds)

    def wait(self) -> None:
        """Wait for all saves in the background, which end in time; all ranks call this together."""
        if self._background is not None:
            self._background.wait()
            self.look()

    def must_repeat(self) -> bool:
        """Return whether a save is due since the newest one has failed; called after each step.

        All ranks call this together. They look after one step, then after 2, 4, 8 and so on until a
        save has succeeded, so that a disk that stays full costs little time, as do the messages by
        which they learn of a save in the background.
        """
        if not (self._is_open and self._tolerant):
            return False
        self._steps += 1
        if self._steps < self._pause:
            return False
        self._steps = 0
        self._pause = 2 * self._pause
        if self._background is None or self._newest_failed:
            is_running = False
            failed = self._newest_failed
        else:
            is_running, failed = self._background.look_at_newest()
        self._is_open = is_running or failed
        return failed

    def newest_has_failed(self) -> bool:
        """Wait for the newest save, and return whether it failed; all ranks call this together."""
        if self._newest_failed or self._background is None:
            return self._newest_failed
        self.wait()
        return self._background.last_has_failed

    def finish(self, write: Write, iteration: int) -> None:
        """Wait for all saves; if the newest one failed, write it again, and wait for the files.

        All ranks call this together, and all raise a CheckpointError if that fails too.
        """
        self.wait()
        if self._background is not None and self._background.last_has_failed:
            started = time.perf_counter()
            write(waits=True)
            self._tell_success(iteration, time.perf_counter() - started)

    def _tell_failure(self, iteration: int, sentence: str) -> None:
        if self._rank != 0:
            return
        if self._tolerant:
            count = f"{self.num_failed} failed so far"
            print(f"note: {sentence} Training goes on ({count}).", flush=True)
        append_event(self._folder, "save_failed", iteration=iteration, rank=0, reason=sentence)

    def _tell_success(self, iteration: int, stall: float, seconds: float | None = None) -> None:
        """Note a save: the seconds for which training waited, and those until a later end.

        A run without background and restarts keeps no list of events for its saves.
        """
        if self._rank == 0 and self._tolerant:
            append_event(
                self._folder,
                "saved",
                iteration=iteration,
                asynchronous=seconds is not None,
                stall=stall,
                seconds=stall if seconds is None else seconds,
            )
