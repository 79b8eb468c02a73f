"""Finds out whether this process replaces one that torchrun ended, and logs restarts of the run."""

from __future__ import annotations

import os
import time

from megatron_ext.disk.events import append_event
from megatron_ext.disk.host_folder import GENERATION_VARIABLE, generation, host_folder
from megatron_ext.parallel.board import BOARD, Board
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.run import Run

FAULT_TIME_VARIABLE = "MEGATRON_EXT_FAULT_TIME"
"""Environment variable: when the fault before this restart was detected, by CLOCK_MONOTONIC."""
FAULT_STEP_VARIABLE = "MEGATRON_EXT_FAULT_STEP"
"""Environment variable with the step in which the fault before this restart occurred."""


def follow_earlier_process() -> None:
    """Count this process as a restart if torchrun ran an earlier one in its place.

    torchrun's own count leaves out restarts that happen because a node joins or leaves. An earlier
    process is recognized by its record in this local rank's slot of the `Board` in shared memory.
    So all local ranks must call this before they write to the board.
    """
    folder = host_folder()
    if folder is None or not (folder / BOARD).exists():
        return
    own = int(os.environ.get("LOCAL_RANK", "0"))
    earlier = Board.of_machine(folder).read_slot(own, num_events=1)
    if earlier is None or earlier.pid == os.getpid():
        return
    os.environ[GENERATION_VARIABLE] = str(max(generation(), earlier.generation + 1))
    os.environ[FAULT_TIME_VARIABLE] = repr(earlier.last_time)
    os.environ[FAULT_STEP_VARIABLE] = str(earlier.iteration)


class RestartReport(Callback):
    """Adds the restart that started this process to the log of faults, in the first step."""

    _is_told = False

    @staticmethod
    def is_due(run: Run) -> bool:
        """Return whether this rank reports that its process is a restart after a fault."""
        return run.context.rank == 0 and generation() > 0 and FAULT_TIME_VARIABLE in os.environ

    def before_step(self) -> None:
        if self._is_told:
            return
        self._is_told = True
        run = self.run
        fault_time = os.environ[FAULT_TIME_VARIABLE]
        restored = run.progress.iteration
        append_event(
            run.config.checkpoint.save,
            "restart",
            rank=0,
            generation=generation(),
            iteration=restored + 1,
            restored_iteration=restored,
            restored_from=run.restored_from,
            steps_lost=max(0, int(os.environ.get(FAULT_STEP_VARIABLE, "0")) - restored),
            world_size=run.context.layout.world_size,
            seconds=round(time.monotonic() - float(fault_time), 4),
        )
