"""Scores in the log and in tables: names, standard errors, and the steps at which they are made."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.text.evaluation import scores
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from megatron_ext.text.evaluation.scores import TaskScores, table, values_of
from megatron_ext.text.tokenizers import TokenizerConfig

RESULTS: dict[str, Any] = {
    "results": {
        "tiny": {
            "alias": "tiny", "acc,none": 0.25, "acc_stderr,none": 0.0625, "exact,strict": 1,
            "exact_stderr,strict": 0.5, "exact,loose": 0.5, "sample_len": 12,
        },
        "other": {"word_perplexity,none": 1234567.0, "word_perplexity_stderr,none": "N/A"},
    },
    "groups": {"all": {"acc,none": 0.75, "acc_stderr,none": "N/A"}},
}  # fmt: skip


def test_metrics_have_names_values_and_standard_errors() -> None:
    assert values_of(RESULTS) == {
        "tiny acc": (0.25, 0.0625),
        "tiny exact strict": (1.0, 0.5),
        "tiny exact loose": (0.5, "N/A"),
        "other word_perplexity": (1234567.0, "N/A"),
        "all acc": (0.75, "N/A"),
    }
    assert table(RESULTS) == [
        "task and metric               value     stderr",
        "tiny acc                       0.25     0.0625",
        "tiny exact strict                 1     0.5000",
        "tiny exact loose                0.5        N/A",
        "other word_perplexity   1.23457e+06        N/A",
        "all acc                        0.75        N/A",
    ]


def callback_of(num_iterations: int, interval: int) -> tuple[TaskScores, Any]:
    """Return a callback of a run that ends at a step, without the model of the run."""
    flags = TaskEvaluationConfig(eval_tasks=["tiny"], eval_tasks_interval=interval)
    records: list[Any] = []
    run: Any = SimpleNamespace(
        config=SimpleNamespace(section=lambda kind: TokenizerConfig("ByteLevelTokenizer")),
        progress=SimpleNamespace(iteration=0, consumed_train_samples=0),
        num_iterations=num_iterations,
        parameter_gather=SimpleNamespace(paused=nullcontext),
        reporters=SimpleNamespace(on_evaluation=records.append),
    )
    callback = TaskScores.__new__(TaskScores)
    callback.run = run
    callback._flags = flags
    callback._tokenizer = None
    callback._scored_at = None
    return callback, records


@pytest.mark.parametrize(
    ("last", "interval", "steps", "found"),
    [(6, 2, 6, [2, 4, 6]), (5, 2, 5, [2, 4, 5]), (9, 2, 5, [2, 4]), (3, 9, 3, [3])],
)
def test_scores_are_made_at_intervals_and_once_at_the_end(
    last: int, interval: int, steps: int, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends before its last step goes on later, so that it is no end of the training."""
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda *_, **__: None)
    monkeypatch.setattr(scores, "scored", lambda *_, **__: RESULTS)
    callback, records = callback_of(last, interval)
    for step in range(1, steps + 1):
        callback.run.progress.iteration = step
        callback.run.progress.consumed_train_samples = 4 * step
        callback.after_step()
    callback.on_train_end()
    assert [record.iteration for record in records] == found
    for record in records:
        assert record.consumed_samples == 4 * record.iteration
        assert (record.split, record.title, record.perplexity) == ("tasks", "task scores", False)
        assert record.losses["tiny exact strict"] == 1.0
