"""A trace of some steps by torch's profiler (``--profile``), for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult


class StepProfiler(Callback):
    """Records the steps from ``--profile-step-start`` up to ``--profile-step-end``.

    The trace goes to ``profile_rank<r>.json`` in the TensorBoard folder, else in the save folder,
    else in the working folder.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        config, rank = run.config, run.context.rank
        self._records = config.training.profile and rank in config.training.profile_ranks
        folder = config.logging.tensorboard_dir or config.checkpoint.save or "."
        self._path = Path(folder) / f"profile_rank{rank}.json"
        self._profiler: torch.profiler.profile | None = None

    def before_step(self) -> None:
        """Start to record before the first step that is asked for."""
        first = self.run.config.training.profile_step_start
        if self._records and self.run.progress.iteration == first:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()

    def after_update(self, result: StepResult) -> None:
        """Write the trace after the last step that is asked for."""
        if self.run.progress.iteration >= self.run.config.training.profile_step_end:
            self._write()

    def on_train_end(self) -> None:
        """Write the trace of a run that ends before that step."""
        self._write()

    def _write(self) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None
