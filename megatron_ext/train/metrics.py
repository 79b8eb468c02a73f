"""The metrics of the steps since the last report, gathered without waiting for the device."""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from torch import Tensor

from megatron_ext.train.batch_size import StepStats
from megatron_ext.train.reporting.records import IterationRecord
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult


class IntervalMetrics:
    """Sums of the steps between two reports."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._unsettled: tuple[int, StepResult] | None = None
        self._reset()

    def _reset(self) -> None:
        self._losses: dict[str, Tensor] = {}
        self._steps = self._skipped = self._nans = self._samples = self._tokens = 0
        self._flops = self._pause = 0.0
        self._last: StepResult | None = None
        self._last_samples = 0
        self._start = time.perf_counter()

    def add(self, result: StepResult, stats: StepStats) -> None:
        """Add a step."""
        self._count_last()
        self._last, self._last_samples = result, stats.samples
        self._steps += 1
        self._samples += stats.samples
        self._tokens += stats.tokens
        self._flops += stats.flops
        for name, loss in result.losses.items():
            counted = torch.stack([loss, (result.counts[name] > 0).to(loss)])
            counted = torch.where(result.update.flag, counted, 0.0)
            self._losses[name] = self._losses.get(name, torch.zeros_like(counted)) + counted
        self._unsettled = self._run.progress.iteration, result
        if self._run.runner.settled:
            self._count_last()

    def settle(self) -> None:
        """Count the last step, and let the learning rate follow it.

        The host waits for the last update, so this is done before progress is saved or reported.
        """
        self._run.runner.settle()
        self._count_last()

    def _count_last(self) -> None:
        """Count and announce the last step if it was skipped, and whether its loss was finite."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None or unsettled[1].update.applied:
            return
        iteration, result = unsettled
        nan = any(not math.isfinite(float(loss)) for loss in result.losses.values())
        self._skipped += 1
        self._nans += nan
        self._run.progress.skipped_iterations += 1
        self._run.progress.nan_iterations += nan
        self._run.reporters.say(
            f"iteration {iteration} was skipped: its gradient norm is {result.update.grad_norm} "
            f"({self._run.progress.skipped_iterations} skipped so far)"
        )

    def pause(self, seconds: float) -> None:
        """Leave out a time that went into something other than steps."""
        self._pause += seconds

    def report_if_due(self) -> None:
        """Report every ``--log-interval`` steps, and after the first step of a run.

        Megatron-LM lets the first step, which it reports at once, count again in the first full
        interval. Our lines are its lines, so a run that starts at iteration 0 does the same.
        """
        if self._run.progress.iteration == 1:
            self.report(keep=True)
        elif self._run.progress.iteration % self._run.config.logging.log_interval == 0:
            self.report()

    def report(self, *, keep: bool = False) -> None:
        """Report the steps since the last report, and start anew unless the sums are kept."""
        self.settle()
        run, last = self._run, self._last
        assert last is not None and run.optimizer is not None
        params_norm = run.params_norm() if run.config.logging.log_params_norm else None
        losses = self._means()
        if self._skipped == self._steps:
            # Finite where only the gradients were not, as after an overflow of a loss scale.
            losses = {name: float(loss) for name, loss in last.losses.items()}
        elapsed = time.perf_counter() - self._start - self._pause
        record = IterationRecord(
            iteration=run.progress.iteration,
            num_iterations=run.num_iterations,
            consumed_samples=run.progress.consumed_train_samples,
            seconds=max(elapsed, 1e-9) / self._steps,
            learning_rate=_in_single_precision(
                get_canonical_lr_for_logging(run.optimizer.param_groups) or 0.0
            ),
            global_batch_size=self._last_samples,
            losses=losses,
            loss_scale=float(run.optimizer.get_loss_scale()),
            grad_norm=last.update.grad_norm,
            samples=self._samples / self._steps,
            sample_name=run.task.sample_name,
            tokens=self._tokens / self._steps,
            flops=self._flops / self._steps,
            world_size=run.context.layout.world_size,
            skipped=self._skipped,
            nans=self._nans,
            total_skipped=run.progress.skipped_iterations,
            num_zeros=last.update.num_zeros,
            params_norm=params_norm,
            peak_flops=run.peak_flops,
            memory=_gpu_memory(run.device),
            epoch=run.progress.epoch,
        )
        run.reporters.on_iteration(record)
        if not keep:
            self._reset()

    def _means(self) -> dict[str, float]:
        """Return the mean of each loss over the steps that had targets of this loss.

        A loss that had no target in any step, such as that of a condition mode that was not drawn,
        is left out. The first loss, which is the loss of the run, always stays, and is then 0.
        """
        totals = {name: total.tolist() for name, total in self._losses.items()}
        first = next(iter(totals), None)
        return {
            name: total / max(count, 1.0)
            for name, (total, count) in totals.items()
            if count or name == first
        }


def _gpu_memory(device: torch.device) -> dict[str, float]:
    """Return the bytes that tensors hold and that the allocator keeps, where there is a GPU."""
    if device.type != "cuda":
        return {}
    return {
        "allocated": float(torch.cuda.memory_allocated(device)),
        "reserved": float(torch.cuda.memory_reserved(device)),
    }


def _in_single_precision(value: float) -> float:
    """Round as Megatron-LM does, whose learning rate goes through a float32 tensor."""
    return float(np.float32(value))
