"""Reports how the saves of a run end, and lets the run continue after a failed one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from megatron_ext.disk.events import append_event
from megatron_ext.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_ext.checkpoint.background import BackgroundSaves


class Write(Protocol):
    """A function that saves the run; its argument says whether to wait for the files."""

    def __call__(self, *, waits: bool) -> None: ...


class Saves:
    """The saves of a run, written in the foreground or in the background.

    Attributes:
        num_failed: number of failed saves. A failure in the background is known on all ranks from
            the next save on.

    Args:
        folder: the save folder; each save is recorded in its log of events (`disk.events`).
        rank: this rank; only rank 0 reports.
        tolerant: whether the run continues after a failed save.
    """

    def __init__(
        self,
        folder: str,
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
        # Whether the newest save may have failed, and the number of failures when it began.
        self._is_open, self._known = False, 0
        # Steps since the last save or check, and the number of steps until the next check.
        self._steps, self._pause = 0, 1

    @property
    def num_failed(self) -> int:
        late = 0 if self._background is None else self._background.num_failed
        return self._failed + late

    def save(self, write: Write, iteration: int, is_last: bool) -> bool:
        """Save by calling ``write``; return whether that worked. All ranks call this together.

        Raises:
            CheckpointError: the save failed, and it is the last, or the run tolerates no failed
                save.
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
        """Report the saves in the background that have ended since the last call."""
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
        """Wait until all background saves end or time out; all ranks call this together."""
        if self._background is not None:
            self._background.wait()
            self.look()

    def must_repeat(self) -> bool:
        """Return whether the newest save has failed and must be repeated; called after each step.

        All ranks call this together. They look at the newest save only 1 step after it, then after
        2, 4, 8 and so on more steps, until a save succeeds. The growing intervals limit the time
        spent on saves to a full disk, and on messages between ranks about background saves.
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
        """Wait for all saves; if the newest one failed, save again and wait for the files.

        All ranks call this together. All raise a CheckpointError if the second save fails, too.
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
        """Append a finished save to the log of events, if the run tolerates failed saves.

        Args:
            stall: seconds for which training waited.
            seconds: seconds until a background save ended; None for a save in the foreground.
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
