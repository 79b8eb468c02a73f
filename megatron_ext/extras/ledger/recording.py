"""Records which samples each step of a run uses, in a file that tools/ledger.py reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_ext import limits
from megatron_ext.checkpoint.stored import find, read_settings
from megatron_ext.config.run import section_name
from megatron_ext.disk.host_folder import generation
from megatron_ext.extras.ledger.step_record import (
    LEDGER_FILE,
    NO_UPDATE,
    REWOUND,
    RecordWriter,
    Steps,
)
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.plan import plan_run
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult


class DataLedger(Callback):
    """Records in the save folder which samples each step uses, for ``--data-order direct``.

    If the run is later resumed with Megatron-LM's order of samples, its steps are recorded with an
    unknown order, so that they are not taken for steps with the direct order. Rank 0 writes. If a
    write fails, the recording ends but the run continues.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._writer: RecordWriter | None = None
        self._batch = self._rewinds = 0
        self._pending: tuple[int, StepResult] | None = None

    def on_train_start(self) -> None:
        run = self.run
        save = run.config.checkpoint.save
        assert save is not None
        with self._writing():
            self._writer = RecordWriter(save)
            self._start(self._writer)

    def _start(self, writer: RecordWriter) -> None:
        run = self.run
        progress = self.run.progress
        here = progress.iteration, progress.consumed_train_samples
        data = run.config.section(DataConfig)
        order = None
        if data.data_order == "direct":
            plan = plan_run(run.config, progress.data_order, *reversed(here))
            first = {span.name: span.first for span in plan.spans.values()}
            order = {**plan.to_dict(), "first_tokens": first, "split": data.split}
        loaded = find(run.config.checkpoint) if run.restored_from == "checkpoint" else None
        folder, past = None, None
        if loaded is not None and not loaded.weights_only:
            folder = loaded.root
            stored = read_settings(loaded.path).get(section_name(DataConfig), {})
            past = order if stored.get("data_order") == "direct" else None
        writer.start(*here, folder, past, time=time.time(), generation=generation())
        writer.order(order)

    @contextmanager
    def _writing(self) -> Iterator[RecordWriter | None]:
        """Yield the writer, or None on ranks without one.

        If writing fails in this context, print a note and stop recording.
        """
        try:
            yield self._writer
        except OSError as error:
            self._writer = None
            reason = limits.cause(error, self.run.config.checkpoint.save)
            print(
                f"note: {LEDGER_FILE} cannot be written ({reason}); training goes on.", flush=True
            )

    def before_step(self) -> None:
        progress = self.run.progress
        batch = self.run.batch_size.global_batch_size
        with self._writing() as writer:
            if writer is None:
                return
            iteration = progress.iteration
            if batch != self._batch:
                writer.steps(
                    Steps(iteration, progress.consumed_train_samples, batch, iteration, iteration)
                )
                self._batch = batch
            writer.count(iteration, iteration + 1)

    def after_update(self, result: StepResult) -> None:
        if self._writer is None:
            return
        self._look_back()
        iteration = self.run.progress.iteration
        with self._writing() as writer:
            if writer is not None:
                writer.count(iteration, iteration)
        self._pending = iteration, result
        if self.run.runner.settled:
            self._look_back()

    def _look_back(self) -> None:
        """Record the last step as not part of the weights if its update was not applied.

        On a GPU this is known only later, so the next step, or the end of training, calls this.
        """
        pending, self._pending = self._pending, None
        if pending is not None and not pending[1].update.applied:
            self._leave_out(pending[0], pending[0], NO_UPDATE)

    def _leave_out(self, first: int, last: int, why: str) -> None:
        with self._writing() as writer:
            if writer is not None:
                writer.write("left_out", first=first, last=last, why=why)

    def after_step(self) -> None:
        for iteration, restored in self.run.rewinds[self._rewinds :]:
            self._leave_out(restored + 1, iteration, REWOUND)
        self._rewinds = len(self.run.rewinds)

    def on_train_end(self) -> None:
        self._look_back()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
