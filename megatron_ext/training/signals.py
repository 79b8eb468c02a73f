"""Reasons to stop early: a signal, or the time limit. All ranks decide alike."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig

EXIT_CODE_SIGNAL = 143
"""Exit code of a run that saved and stopped because of the exit signal (128 + SIGTERM)."""


class StopRequests:
    """Watches the exit signal and the clock.

    Args:
        config: ``--exit-signal-handler`` and ``--exit-duration-in-mins`` switch the watches on.
        started: `time.time` of the start of the run.
    """

    def __init__(self, config: RunConfig, started: float) -> None:
        training = config.training
        self._limit_s = None
        if training.exit_duration_in_mins is not None:
            self._limit_s = training.exit_duration_in_mins * 60.0
        self._started = started
        self._signalled = False
        self._watch_signal = training.exit_signal_handler
        if self._watch_signal:
            signal.signal(training.exit_signal_number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True

    def check(self, device: torch.device) -> str | None:
        """Why all ranks should stop now: ``"signal"``, ``"duration"`` or None.

        Costs one small all-reduce where a watch is on, nothing otherwise.
        """
        if not self._watch_signal and self._limit_s is None:
            return None
        late = self._limit_s is not None and time.time() - self._started > self._limit_s
        flags = torch.tensor([self._signalled, late], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
        signalled, late_anywhere = flags.tolist()
        if signalled:
            return "signal"
        return "duration" if late_anywhere else None
