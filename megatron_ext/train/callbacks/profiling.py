"""Some steps under torch's profiler (--profile), as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig


class StepProfiler:
    """Records the steps from ``--profile-step-start`` up to ``--profile-step-end``.

    The trace goes to ``profile_rank<r>.json`` in the TensorBoard folder, else in the save folder,
    else in the working folder.
    """

    def __init__(self, config: RunConfig, rank: int) -> None:
        training = config.training
        self._wanted = training.profile and rank in training.profile_ranks
        self._first, self._end = training.profile_step_start, training.profile_step_end
        folder = config.logging.tensorboard_dir or config.checkpoint.save or "."
        self._path = Path(folder) / f"profile_rank{rank}.json"
        self._profiler: torch.profiler.profile | None = None

    def before_step(self, iteration: int) -> None:
        """Called with the number of steps done so far."""
        if self._wanted and iteration == self._first:
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()

    def after_step(self, iteration: int) -> None:
        """Called with the number of steps done; writes the trace after the last recorded one."""
        if self._profiler is not None and iteration >= self._end:
            self.stop()

    def stop(self) -> None:
        """End a recording that is under way."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None
