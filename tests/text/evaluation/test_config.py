"""Flags of tasks without effect in training are told."""

import pytest

from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from tests.training_runs import SMALL, check_refused


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--eval-tasks a b", "`--eval-tasks` (a b) needs `--eval-tasks-interval` in training,"),
        ("--eval-tasks-interval 2", "`--eval-tasks-interval` has an effect only with `--eval-t"),
        ("--eval-tasks-path x", "`--eval-tasks-path` has an effect only with `--eval-tasks`;"),
        ("--eval-tasks-limit 3", "`--eval-tasks-limit` has an effect only with `--eval-tasks`;"),
        ("--eval-num-fewshot 0", "`--eval-num-fewshot` has an effect only with `--eval-tasks`;"),
    ],
)
def test_a_flag_without_its_partner_is_told(words: str, sentence: str) -> None:
    check_refused([*SMALL, *words.split()], sentence)


def test_tasks_and_their_interval_are_enough() -> None:
    assert TaskEvaluationConfig(["a"], ["x"], 2, 0.5, 3).training_errors() == []
    assert TaskEvaluationConfig().training_errors() == []
