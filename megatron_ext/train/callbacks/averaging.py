"""The moving average of the weights (``--ema-decay``), which follows the updates."""

from __future__ import annotations

from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.step import StepResult


class WeightAverage(Callback):
    """Lets the average follow each update of the run's model, or every few of them."""

    def after_update(self, result: StepResult) -> None:
        """Take the updated weights into the average, unless the update was skipped."""
        run, update = self.run, result.model_update
        if run.ema is None or update is None:
            return
        step = run.progress.iteration
        rests = run.runner.model_steps(step) % run.config.ema.ema_update_every > 0
        if rests and step >= run.ema.start:
            return
        if not update.known:
            run.ema.update(step, update.flag)
        elif update.applied:
            run.ema.update(step)
