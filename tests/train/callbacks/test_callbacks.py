"""A user's callback sees every moment of a run on every rank, and may save or end it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_ext.checkpoint.files import published
from megatron_ext.text.task import GPT
from megatron_ext.train.callbacks.callback import Callback, Decision, Losses
from megatron_ext.train.step import StepResult
from tests.training_runs import TINY, mock_data, train_on_ranks, training_rows, without

FLAGS = [
    *without(TINY, "--eval-iters", "--eval-interval", "--split", "--num-layers"),
    *mock_data(),
    *"--num-layers 2 --split 90,10,0 --eval-iters 1 --eval-interval 2 --train-iters 5".split(),
]


class Diary(Callback):
    """Writes down each moment, and ends the run after the third step."""

    def note(self, moment: str) -> None:
        folder = Path(self.run.config.checkpoint.save or "")
        with (folder / f"diary_{self.run.context.rank}").open("a") as diary:
            diary.write(f"{moment} {self.run.progress.iteration}\n")

    def on_train_start(self) -> None:
        self.note("start")

    def before_step(self) -> None:
        self.note("before step")

    def after_update(self, result: StepResult) -> None:
        self.note(f"updated {result.update.applied}")

    def before_evaluation(self) -> None:
        self.note("before evaluation")

    def after_evaluation(self, losses: Losses) -> None:
        self.note(f"evaluated {len(losses)}")

    def after_step(self) -> None:
        self.note("after step")

    def decide(self, decision: Decision) -> None:
        decision.save |= self.run.progress.iteration == 1
        if self.run.progress.iteration == 3:
            decision.stop, decision.exit_code = "the diary is full", 5

    def on_train_end(self) -> None:
        self.note("end")


def test_a_callback_of_a_task_is_called_in_order_and_decides(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = dataclasses.replace(GPT, callbacks=(Diary,))
    code, rows = train_on_ranks(FLAGS, ranks=2, save=tmp_path, task=task)
    assert (code, len(training_rows(rows))) == (5, 3)
    assert published(tmp_path) == [1, 3]
    assert "> exiting at iteration 3 (the diary is full)" in capfd.readouterr().out
    moments = ["start 0"]
    for step in (1, 2, 3):
        moments += [f"before step {step - 1}", f"updated True {step}"]
        moments += ["before evaluation 2", "evaluated 1 2"] if step == 2 else []
        moments.append(f"after step {step}")
    for rank in (0, 1):
        diary = (tmp_path / f"diary_{rank}").read_text().splitlines()
        assert diary == [*moments, "end 3"]
