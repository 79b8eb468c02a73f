"""Requests to stop early, by a signal or by the time limit, on which all ranks agree."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch

from megatron_ext.config.training import TrainingConfig
from megatron_ext.device.streams import HostCopy, to_device

EXIT_CODE_SIGNAL = 143
"""Exit code of a run that saved and stopped because of the exit signal (128 + SIGTERM)."""


class StopRequests:
    """Watches the exit signal and the clock.

    Args:
        training: ``--exit-signal-handler`` and ``--exit-duration-in-mins`` switch the watches on.
        started: `time.time` of the start of the run.
    """

    def __init__(self, training: TrainingConfig, started: float) -> None:
        self._limit_s = None
        if training.exit_duration_in_mins is not None:
            self._limit_s = training.exit_duration_in_mins * 60.0
        self._started = started
        self._signalled = False
        self._before: HostCopy | None = None
        self._watch_signal = training.exit_signal_handler
        if self._watch_signal:
            signal.signal(training.exit_signal_number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True

    def check(self, device: torch.device, *, late: bool | None = None) -> str | None:
        """Return why all ranks should stop now: ``"signal"``, ``"duration"`` or None.

        All ranks call this together. It costs one small all-reduce where a watch is on.

        Args:
            device: device on which the ranks can reduce.
            late: return the answer to the previous check, which has arrived by now, so that the
                host does not wait for a GPU; the default is to do so on a GPU.
        """
        if not self._watch_signal and self._limit_s is None:
            return None
        over = self._limit_s is not None and time.time() - self._started > self._limit_s
        flags = to_device(torch.tensor([self._signalled, over], dtype=torch.int32), device)
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
        answer: HostCopy | None = HostCopy(flags)
        if late is None:
            late = device.type == "cuda"
        if late:
            answer, self._before = self._before, answer
        if answer is None:
            return None
        signalled, over_anywhere = answer.read()
        if signalled:
            return "signal"
        return "duration" if over_anywhere else None
