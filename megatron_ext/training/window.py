"""What happened since the last report, gathered without waiting for the device each step."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from torch import Tensor

from megatron_ext.training.reporting import IterationRecord
from megatron_ext.training.step import StepResult

if TYPE_CHECKING:
    from megatron_ext.training.setup import Run


class LogWindow:
    """Sums the steps between two reports."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reset()

    def _reset(self) -> None:
        self._losses: dict[str, Tensor] = {}
        self._steps = self._updates = self._skipped = self._nans = self._rows = 0
        self._pause = 0.0
        self._last: StepResult | None = None
        self._start = time.perf_counter()

    def add(self, result: StepResult, rows: int, *, nan: bool) -> None:
        """One more step, of so many sequences on all ranks."""
        self._last = result
        self._steps += 1
        self._rows += rows
        self._skipped += not result.update.applied
        self._nans += nan
        if result.update.applied:
            self._updates += 1
            for name, loss in result.losses.items():
                self._losses[name] = self._losses.get(name, torch.zeros_like(loss)) + loss

    def pause(self, seconds: float) -> None:
        """Time that went into something else than steps."""
        self._pause += seconds

    def report(self, *, keep: bool = False) -> None:
        """Report the steps since the last report.

        Args:
            keep: do not start anew. Megatron-LM reports the first step of a run at once and lets
                it count again in the first full interval; so that our lines are its lines, a run
                that starts at iteration 0 does the same.
        """
        run, last = self._run, self._last
        assert last is not None and run.optimizer is not None
        params_norm = run.params_norm() if run.config.logging.log_params_norm else None
        losses = {name: float(total) / self._updates for name, total in self._losses.items()}
        if not losses:
            losses = dict.fromkeys(last.losses, math.nan)
        batch = run.batch_size.global_batch_size
        elapsed = time.perf_counter() - self._start - self._pause
        record = IterationRecord(
            iteration=run.progress.iteration,
            num_iterations=run.num_iterations,
            consumed_samples=run.progress.consumed_train_samples,
            seconds=max(elapsed, 1e-9) / self._steps,
            learning_rate=_in_single_precision(
                get_canonical_lr_for_logging(run.optimizer.param_groups) or 0.0
            ),
            global_batch_size=batch,
            losses=losses,
            loss_scale=float(run.optimizer.get_loss_scale()),
            grad_norm=last.update.grad_norm,
            tokens=self._rows / self._steps * (run.config.model.seq_length or 0),
            flops=run.flops_per_sample * self._rows / self._steps,
            world_size=run.context.layout.world_size,
            skipped=self._skipped,
            nans=self._nans,
            total_skipped=run.progress.skipped_iterations,
            num_zeros=last.update.num_zeros,
            params_norm=params_norm,
            peak_flops=run.peak_flops,
        )
        run.reporters.on_iteration(record)
        if not keep:
            self._reset()


def _in_single_precision(value: float) -> float:
    """As Megatron-LM prints it: its learning rate goes through a float32 tensor."""
    return float(np.float32(value))
