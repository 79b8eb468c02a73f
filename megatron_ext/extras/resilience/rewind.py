"""Loads the state of a run's newest checkpoint while the run continues with later data.

Iterations and samples keep counting, so that batch size schedules, the length of the run and its
checkpoints do not change. The steps since the checkpoint count as skipped steps: they use up their
samples and do not advance the learning rate.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from megatron_ext.checkpoint.adapters import FrozenBase
from megatron_ext.checkpoint.files import published, standing_folder_of
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.disk.host_folder import generation
from megatron_ext.parallel.collectives import on_first_rank
from megatron_ext.train.batch_size import Progress
from megatron_ext.train.run import Run


class Rewind:
    """Finds the newest checkpoint of the run in the save folder, and loads it.

    Checkpoints that the run has written since it started belong to it. If the run resumed from the
    save folder, the checkpoints up to the iteration from which it resumed belong to it as well. All
    ranks create this object and call its methods together.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._start = run.progress.iteration
        checkpoint = run.config.checkpoint
        self._root = None if checkpoint.save is None else Path(checkpoint.save)
        goes_on = generation() > 0 or (
            None not in (checkpoint.load, checkpoint.save)
            and os.path.realpath(checkpoint.load or "") == os.path.realpath(checkpoint.save or "")
        )
        self._led_here = self._start if goes_on else 0
        self._before = on_first_rank(self._written, "looking for checkpoints")

    def _written(self) -> dict[int, int]:
        """Return, by iteration, when each checkpoint in the save folder was written, in ns."""
        root = self._root
        if root is None or not root.is_dir():
            return {}
        return {i: standing_folder_of(root, i).stat().st_mtime_ns for i in published(root)}

    def newest(self) -> int | None:
        """Return the iteration of the run's newest checkpoint; None if it has none."""

        def look() -> int | None:
            own = [
                iteration
                for iteration, time in self._written().items()
                if iteration <= self._led_here or self._before.get(iteration) != time
            ]
            return max(own, default=None)

        return on_first_rank(look, "looking for checkpoints")

    def go_back(self) -> int | None:
        """Load the newest checkpoint's state; return its iteration, or None if there is none."""
        run = self._run
        if run.saves is not None:
            run.saves.wait()
        iteration = self.newest()
        if iteration is None:
            return None
        config = dataclasses.replace(
            run.config.checkpoint,
            load=run.config.checkpoint.save,
            ckpt_step=iteration,
            resume_mode=None,
            finetune=False,
            no_load_optim=False,
            no_load_rng=False,
        )
        assert run.scheduler is not None
        run.scheduler.num_steps = 0  # megatron-core adds the loaded steps to the present ones
        frozen = FrozenBase.of_run(
            run.config.lora, run.config.training.seed, run.config.checkpoint.published
        )
        with run.parameter_gather.paused():
            loaded = CheckpointManager(config, run.context, frozen).load(
                model=run.chunks,
                optimizer=run.optimizer,
                scheduler=run.scheduler,
                ema=run.ema,
                extra_state=run.runner.extra_state,
            )
        if run.runner.amax_histories is not None:
            run.runner.amax_histories.forget()
        assert loaded is not None
        saved = Progress.from_dict(loaded.progress)
        progress = run.progress
        # Some of the steps since then may already be counted as skipped.
        progress.skipped_iterations = saved.skipped_iterations + progress.iteration - iteration
        progress.average_updates = saved.average_updates
        progress.average_start = saved.average_start
        return iteration
