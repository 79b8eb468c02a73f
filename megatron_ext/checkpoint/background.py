"""Saves checkpoints while training goes on: ``--async-save``.

At a step boundary each rank copies its part of the checkpoint to host memory, which takes a
fraction of the time of a whole save. It then hands the copy to its `Helper`, a process that was
forked before the rank had threads, process groups or a GPU. A failed save is reported and counted,
and the next save is tried as usual. A helper that dies or hangs is replaced, and the new helper
gets the same job.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch

from megatron_ext.checkpoint import helper, publish
from megatron_ext.checkpoint.best import BestCheckpoint
from megatron_ext.checkpoint.helper import FAILED, PUBLISHED, TIDIED, WRITTEN, Job, Report
from megatron_ext.checkpoint.prepared import PreparedSave, SavePreparer, replica_groups
from megatron_ext.checkpoint.snapshot import SnapshotFile, content_of
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.device.streams import to_device
from megatron_ext.errors import CheckpointError, held_signals
from megatron_ext.parallel.collectives import on_every_rank
from megatron_ext.parallel.context import ParallelContext

ATTEMPTS = 3
"""Number of helpers that try a job before it is given up."""
_SECONDS_BETWEEN_LOOKS = 0.005
KNOWN, BUSY, UNKNOWN, BROKEN = range(4)
"""How ready a rank is to begin a save, from best to worst.

KNOWN: its state has the structure of the last save, so that the same plan (the data that each rank
writes) is used again. BUSY: it must wait for free host memory. UNKNOWN: the structure has changed,
so all ranks must make a new plan. BROKEN: it cannot save.
"""


class Helper:
    """A rank's connection to the helper process that writes the rank's part of checkpoints."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with held_signals():
            self.pid = os.fork()
            if self.pid == 0:
                code = 1
                try:
                    self.connection.close()
                    helper.serve(theirs, parent)
                    code = 0
                finally:
                    os._exit(code)
        theirs.close()

    def send(self, job: Job) -> None:
        """Send a job to the helper.

        A helper that has died raises no error here, but `reports` returns None. The job can then be
        sent again after `restart`.
        """
        with suppress(OSError):
            self.connection.send(job)

    def reports(self) -> list[Report] | None:
        """Return the helper's messages since the last call (maybe none), without waiting.

        Return None if there are none and the helper has died.
        """
        reports: list[Report] = []
        try:
            while self.connection.poll():
                reports.append(self.connection.recv())
        except (EOFError, OSError):
            return reports or None
        return reports

    def end(self) -> str:
        """Kill the helper process if it is still alive; return how it died, such as "SIGKILL"."""
        self.connection.close()
        # An idle helper exits by itself. A helper that is writing is no longer useful.
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return "an unknown cause"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def restart(self) -> str:
        """Start a new helper process in place of the old one; return how the old one died.

        The new process is spawned, because forking a rank that has running threads would be unsafe.
        It needs seconds to start, but the rank does not wait.
        """
        cause = self.end()
        self.connection, theirs = Pipe()
        code = f"from {helper.__name__} import main; main({theirs.fileno()}, {os.getpid()})"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        words = [sys.executable, "-c", code]
        with held_signals():
            started = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=environment)
        self.pid = started.pid
        # `end` waits for the process.
        started.returncode = 0
        theirs.close()
        return cause


@contextmanager
def ending(process: Helper | None) -> Iterator[None]:
    """Kill the helper process when the context exits, so that it cannot write files any more.

    If ``process`` is None, do nothing.
    """
    try:
        yield
    finally:
        if process is not None:
            process.end()


def nameless_file() -> SnapshotFile:
    """Return an anonymous file in memory, which disappears with the processes that use it.

    Unlike files in ``/dev/shm``, it does not count against that file system's size, which
    containers keep small.
    """
    descriptor = os.memfd_create("checkpoint")
    file = SnapshotFile(Path(f"/proc/{os.getpid()}/fd/{descriptor}"))
    weakref.finalize(file, os.close, descriptor)
    return file


@dataclass
class _Running:
    job: Job
    slot: SnapshotFile
    began: float
    attempt_began: float
    attempts: int = 1
    stages: set[str] = field(default_factory=set)
    seen_bytes: int = 0

    def has_grown(self) -> bool:
        """Return whether the checkpoint's files have grown since the last call."""
        before, self.seen_bytes = self.seen_bytes, helper.written_bytes(self.job.folder)
        if self.seen_bytes <= before:
            return False
        self.attempt_began = time.monotonic()
        return True


@dataclass(frozen=True)
class Outcome:
    """The result of a save, known to rank 0 only.

    ``reason`` says why the save failed, and is empty if it worked. ``seconds`` is its duration.
    """

    iteration: int
    seconds: float
    reason: str = ""


class BackgroundSaves:
    """The saves of a run that are written in the background.

    All ranks call `begin`, `wait` and `look_at_newest` together.

    Attributes:
        num_failed: number of saves that failed after they had begun.
        last_has_failed: whether the newest save failed.

    Args:
        process: the helper process that writes this rank's part.
        seconds: time limit without progress. If the files of a checkpoint do not grow for so
            long, a rank replaces its helper.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        context: ParallelContext,
        device: torch.device,
        process: Helper,
        *,
        seconds: float,
    ) -> None:
        self._config = config
        self._context = context
        self._device = device
        self._helper = process
        self._seconds = seconds
        self._preparer = SavePreparer(config, replica_groups(context))
        self._free: list[SnapshotFile] = []
        self._num_slots = 0
        self._running: deque[_Running] = deque()
        self._ended: list[Outcome] = []
        self._count = self._last_iteration = 0
        self.num_failed = 0
        self.last_has_failed = False

    def begin(
        self,
        iteration: int,
        state: Callable[[], dict[str, Any]],
        progress: dict[str, Any],
        run_config: dict[str, Any],
        best: tuple[BestCheckpoint, ...],
        superseded: tuple[int, ...],
    ) -> None:
        """Copy the run's state to host memory, and send the helpers a job to write it.

        All ranks call this together. If the memory that ``--async-save-buffer`` allows is in use,
        first wait for an earlier save to end.

        Args:
            iteration: number of training steps done, which gives the checkpoint its name.
            state: called once; returns the sharded and the common state to save, in one mapping.
            progress: counters of the run, such as consumed samples, as values for JSON.
            run_config: the resolved configuration, as sections of plain values.
            best: the checkpoints with the lowest validation losses, lowest first; none is removed.
            superseded: iterations whose checkpoints are removed once the new one is complete.

        Raises:
            CheckpointError: the save cannot begin on some rank; raised on all ranks.
        """
        root = Path(self._config.save or "")
        self._wait_for_iteration(iteration)
        current = state()
        counters = pickle.dumps((progress, run_config))
        fault = ""
        prepared: PreparedSave | None = None
        slot: SnapshotFile | None = None
        try:
            if self._context.rank == 0:
                publish.prepare(root, iteration, [entry.job.iteration for entry in self._running])
            prepared = self._preparer.prepare_alike(current)
        except (OSError, CheckpointError) as error:
            fault = f"`--save` ({root}) cannot be written: {error}"
        while True:
            if slot is None and prepared is not None and not fault:
                slot, fault = self._copy(iteration, prepared, counters)
            own = BROKEN if fault else UNKNOWN if prepared is None else BUSY if not slot else KNOWN
            verdict = self._worst(own)
            if verdict == UNKNOWN:
                self._free += [slot] if slot else []
                prepared = self._preparer.prepare(current)
                slot = None
            elif verdict == BUSY:
                self.poll()
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            else:
                break
        if verdict == BROKEN:
            self._free += [slot] if slot else []
            on_every_rank(lambda: _raise(fault), "The save could not begin")
        assert slot is not None
        self._submit(iteration, slot, best, superseded)

    def _copy(
        self, iteration: int, prepared: PreparedSave, counters: bytes
    ) -> tuple[SnapshotFile | None, str]:
        """Copy this rank's part of a checkpoint to a free slot, which is a file in host memory.

        Args:
            iteration: number of training steps done.
            prepared: the plan and the values of this rank's part.
            counters: the pickled pair (counters of the run, configuration of the run).

        Returns:
            (slot, ""); (None, "") if no slot is free now; or (None, reason) if copying failed.
        """
        slot = self._free_slot(prepared.num_bytes)
        if slot is None:
            return None, ""
        content = prepared.plan.pickled, prepared.values, prepared.common, counters
        try:
            slot.write(iteration, content_of(content), with_digest=False)
        except (OSError, CheckpointError) as error:
            self._free.append(slot)
            return None, str(error)
        return slot, ""

    def _free_slot(self, num_bytes: int) -> SnapshotFile | None:
        """Return a slot (file in memory) for ``num_bytes``: a free one, or else a new one.

        The result is None if the slots in use already fill the memory that ``--async-save-buffer``
        allows.
        """
        if self._free:
            return self._free.pop()
        buffer = self._config.async_save_buffer
        most = 1 if buffer is None else max(1, int(buffer * 2**30 / max(1, num_bytes)))
        if self._num_slots >= most:
            return None
        self._num_slots += 1
        return nameless_file()

    def _worst(self, verdict: int) -> int:
        """Return the maximum of ``verdict`` over all ranks, which call this together.

        A verdict says whether a rank can begin a save: one of this module's constants from `KNOWN`
        (0, it can) to `BROKEN` (3, it cannot). The same all-reduce updates `num_failed` and
        `last_has_failed`, since only rank 0 knows which saves have failed.
        """
        # What other ranks know about the newest save may be the result of the save before it.
        own = [verdict, self.num_failed, int(self.last_has_failed and self._context.rank == 0)]
        reduced = to_device(torch.tensor(own, dtype=torch.int32), self._device)
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX)
        worst, self.num_failed, failed = reduced.tolist()
        self.last_has_failed = bool(failed)
        return int(worst)

    def _submit(
        self,
        iteration: int,
        slot: SnapshotFile,
        best: tuple[BestCheckpoint, ...],
        superseded: tuple[int, ...],
    ) -> None:
        self._count = self._count + 1
        self._last_iteration = iteration
        self.last_has_failed = False
        job = Job(
            number=self._count,
            iteration=iteration,
            rank=self._context.rank,
            world_size=self._context.layout.world_size,
            snapshot=str(slot.path),
            root=str(self._config.save),
            # The helpers of other ranks may need replacing during this wait.
            seconds=ATTEMPTS * self._seconds,
            config=self._config,
            best=best,
            superseded=superseded,
        )
        now = time.monotonic()
        self._running.append(_Running(job, slot, now, now))
        self._helper.send(job)

    def poll(self) -> None:
        """Read the messages of this rank's helper, and replace the helper if it died or hangs.

        This takes microseconds while all is well. The results of saves are returned by `ended`.
        """
        if not self._running:
            return
        reports = self._helper.reports()
        for report in reports or ():
            self._note(report)
        if not self._running:
            return
        oldest = self._running[0]
        now = time.monotonic()
        waits_for_others = WRITTEN in oldest.stages
        limit = self._seconds + (oldest.job.seconds if waits_for_others else 0)
        if reports is None:
            self._replace("ended by {}")
        elif now - oldest.attempt_began > limit and not oldest.has_grown():
            self._replace(f"silent for {limit:g} seconds, and then ended by {{}}")

    def _note(self, report: Report) -> None:
        entry = next((x for x in self._running if x.job.number == report.number), None)
        if entry is None:
            return
        entry.stages.add(report.stage)
        entry.attempt_began = time.monotonic()
        is_over = report.stage in (TIDIED, FAILED) or entry.job.rank != 0
        if is_over:
            self._end(entry, report.reason)

    def _end(self, entry: _Running, reason: str = "") -> None:
        self._running.remove(entry)
        self._free.append(entry.slot)
        if entry.job.rank == 0:
            seconds = time.monotonic() - entry.began
            self._ended.append(Outcome(entry.job.iteration, seconds, reason))
            self.num_failed += bool(reason)
            self.last_has_failed = bool(reason)
        if self._running:
            self._running[0].attempt_began = time.monotonic()

    def _replace(self, fate: str) -> None:
        """Start a new helper for this rank, and send it all unfinished jobs of the old one.

        If `ATTEMPTS` helpers have tried the oldest job, give that job up.

        Args:
            fate: what happened to the old helper, for the log. A ``{}`` in this text is replaced by
                how the process ended, such as "SIGKILL".
        """
        cause = self._helper.restart()
        oldest = self._running[0]
        what = f"The helper process that writes checkpoints was {fate.format(cause)}"
        if oldest.attempts >= ATTEMPTS and self._is_published(oldest):
            self._say(f"{what}; it is replaced, but old checkpoints may be left.")
            self._end(oldest)
        elif oldest.attempts >= ATTEMPTS:
            self._say(f"{what}; it is replaced, but its checkpoint is given up.")
            if oldest.job.rank != 0:
                with suppress(OSError):
                    helper.tell_failure(oldest.job.folder, oldest.job.rank, what)
            self._end(oldest, f"{what}, as {ATTEMPTS - 1} before it")
        else:
            self._say(f"{what}; another one takes over its work.")
        oldest.attempts += 1
        for entry in self._running:
            entry.attempt_began = time.monotonic()
            self._helper.send(entry.job)

    @staticmethod
    def _is_published(entry: _Running) -> bool:
        """Return whether this is rank 0 and its helper has published the checkpoint of ``entry``.

        A published checkpoint is complete, even if the helper died afterwards.
        """
        is_first = entry.job.rank == 0
        return is_first and (PUBLISHED in entry.stages or helper.is_published(entry.job))

    def ended(self) -> list[Outcome]:
        """Return the saves that ended since the last call; the list is empty except on rank 0."""
        self.poll()
        outcomes, self._ended = self._ended, []
        return outcomes

    def _wait_for_iteration(self, iteration: int) -> None:
        """Wait for all running saves to end if the newest one saves the same ``iteration``.

        Both would write to the same folder. Otherwise return at once. All ranks call this together.
        """
        # All ranks have started the same saves, but only rank 0 knows which are published.
        if self._count and iteration == self._last_iteration:
            self.wait()

    def wait(self) -> None:
        """Wait for all saves to end, each within its time limit; all ranks call this together."""
        while self._worst(int(bool(self._running))):
            self.poll()
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def look_at_newest(self) -> tuple[bool, bool]:
        """Return whether a save is running, and whether the newest save failed.

        The second value is False while a save is running. All ranks call this together.
        """
        is_running = bool(self._worst(int(bool(self._running))))
        return is_running, self.last_has_failed and not is_running

    def _say(self, text: str) -> None:
        print(f"note: [rank {self._context.rank}] {text}", flush=True)


def _raise(fault: str) -> None:
    if fault:
        raise CheckpointError(fault)
