"""Flags of tasks that have no effect or cannot be followed are told before a run."""

import sys
from types import SimpleNamespace

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.text.evaluation import scores
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from tests.training_runs import SMALL, check_refused, config_of


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


def test_tasks_of_a_training_run_need_the_package_and_a_model_with_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    managed: list[TaskEvaluationConfig] = []
    lm = SimpleNamespace(task_manager=managed.append)
    monkeypatch.setitem(sys.modules, "megatron_ext.text.evaluation.lm", lm)
    monkeypatch.setattr(scores, "find_spec", lambda name: name)
    config = config_of(SMALL)
    flags = TaskEvaluationConfig(eval_tasks=["a", "b"], eval_tasks_interval=1)
    scores.check_training(config.with_section(flags))
    assert managed == [flags]
    split = config_of([*SMALL, "--context-parallel-size", "2"], ranks=2).with_section(flags)
    with pytest.raises(ConfigError, match="`--context-parallel-size` .* must be 1 where text"):
        scores.check_training(split)
    monkeypatch.setattr(scores, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"`--eval-tasks` \(a b\) needs the package lm_eval, whic"
    ):
        scores.check_training(config.with_section(flags))
    assert managed == [flags]
