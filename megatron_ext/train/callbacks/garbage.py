"""Garbage collection at the same steps on all ranks (``--manual-gc``)."""

from __future__ import annotations

import gc

from megatron_ext.train.callbacks.callback import Callback, Losses, due


class GarbageCollection(Callback):
    """Collects every ``--manual-gc-interval`` steps and around evaluations, not when Python would.

    Without ``--manual-gc`` it leaves Python's own collection alone.
    """

    def on_train_start(self) -> None:
        """Switch Python's own collection off."""
        if self.run.config.training.manual_gc:
            gc.disable()
            gc.collect()

    def after_step(self) -> None:
        """Collect after each multiple of the interval."""
        training = self.run.config.training
        if training.manual_gc and due(self.run.progress.iteration, training.manual_gc_interval):
            gc.collect()

    @property
    def _around_evaluations(self) -> bool:
        return self.run.config.training.manual_gc and self.run.config.training.manual_gc_eval

    def before_evaluation(self) -> None:
        """Make room for the evaluation."""
        if self._around_evaluations:
            gc.collect()

    def after_evaluation(self, losses: Losses) -> None:
        """Collect what the evaluation has left."""
        if self._around_evaluations:
            gc.collect(generation=0)
