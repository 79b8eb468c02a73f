"""Scores in the log, in tables and files: names, errors, flags, and the steps of their making."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.text.evaluation import run as runs
from megatron_ext.text.evaluation import scores, service, tool
from megatron_ext.text.evaluation.config import ResultsConfig, TaskEvaluationConfig
from megatron_ext.text.evaluation.scores import TaskScores, table, values_of
from megatron_ext.text.generation import decode, forward, requests
from megatron_ext.text.tokenizers import TokenizerConfig
from megatron_ext.text.tokenizers.base import ByteLevelTokenizer
from tests.training_runs import SMALL, config_of

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
    paused: list[bool] = []
    run: Any = SimpleNamespace(
        paused=paused,
        config=SimpleNamespace(section=lambda kind: TokenizerConfig("ByteLevelTokenizer")),
        progress=SimpleNamespace(iteration=0, consumed_train_samples=0),
        num_iterations=num_iterations,
        parameter_gather=SimpleNamespace(paused=lambda: nullcontext(paused.append(True))),
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

    def scored(run: Any, *_: Any) -> dict[str, Any]:
        # The gather of updated parameters must not run beside the forward passes.
        assert run.paused.pop()
        return RESULTS

    monkeypatch.setattr(scores, "scored", scored)
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


def test_scoring_takes_the_flags_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    def decoder(*given: Any, **options: Any) -> str:
        made["decoder"] = (given, options)
        return "decoder"

    def run_tasks(model: Any, flags: Any, **options: Any) -> dict[str, Any]:
        made["tasks"] = (model, flags, options)
        return RESULTS

    leading = SimpleNamespace(lead=lambda work, what: (what, work()))
    monkeypatch.setattr(forward.PackedForward, "of_run", lambda run: "forward")
    monkeypatch.setattr(requests, "end_tokens", lambda config, tokenizer: {3})
    monkeypatch.setattr(decode, "Decoder", decoder)
    monkeypatch.setattr(service, "ModelService", lambda *given: leading)
    lm = SimpleNamespace(MegatronLM=lambda *given: given, run_tasks=run_tasks)
    monkeypatch.setitem(sys.modules, "megatron_ext.text.evaluation.lm", lm)
    flags = TaskEvaluationConfig(eval_tasks=["tiny"], eval_batch_size=5)
    run: Any = SimpleNamespace(config=None)
    tokenizer: Any = "tokenizer"
    found = scores.scored(run, tokenizer, flags, bootstrap_iters=7, chat_tokenizer="chat")
    assert found == ("Scoring on `--eval-tasks`", RESULTS)
    assert made["decoder"] == (("forward", "tokenizer", {3}), {"batch_size": 5})
    options = {"bootstrap_iters": 7, "apply_chat_template": True}
    assert made["tasks"] == ((leading, "tokenizer", "chat"), flags, options)
    scores.scored(run, tokenizer, flags)
    assert made["tasks"][2] == {"bootstrap_iters": 0, "apply_chat_template": False}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_program_prints_a_table_and_writes_its_results(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}

    def scored(run: Any, tokenizer: Any, flags: Any, **options: Any) -> Any:
        given.update(options)
        return RESULTS if rank == 0 else None

    utils = SimpleNamespace(handle_non_serializable=str)
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "lm_eval.utils", utils)
    monkeypatch.setattr(runs, "scored", scored)
    monkeypatch.setattr(runs, "with_tokenizer", lambda config: (config, "tokenizer"))
    file = tmp_path / "results.json"
    own = ResultsConfig(results_file=str(file), bootstrap_iters=9, apply_chat_template=True)
    config = config_of(SMALL).with_section(own, TaskEvaluationConfig(eval_tasks=["tiny"]))
    monkeypatch.setattr(runs, "load_chat_tokenizer", lambda *_, **__: "loaded")
    monkeypatch.setattr(runs, "with_known_date", lambda loaded, date: (f"dated {loaded}", "a day"))
    run: Any = SimpleNamespace(config=config, context=SimpleNamespace(rank=rank))
    runs.evaluate_model(run)
    told = capsys.readouterr().out
    assert given["bootstrap_iters"] == 9
    if rank == 0:
        assert given["chat_tokenizer"] == "dated loaded"
        assert told.splitlines() == ["> a day", *table(RESULTS)]
        assert json.loads(file.read_text()) == RESULTS
    else:
        assert (given["chat_tokenizer"], told, file.exists()) == (None, "", False)


def test_a_program_checks_its_flags_before_it_loads_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(runs, "prepare", lambda config: (config, "tokenizer"))
    monkeypatch.setattr(runs, "check_tasks", checked.append)
    flags = TaskEvaluationConfig(eval_tasks=["tiny"])
    config = config_of(SMALL).with_section(flags)
    fine = config.with_section(ResultsConfig(results_file=str(tmp_path / "x.json")))
    assert runs.prepare_evaluation(fine) == (fine, "tokenizer")
    assert (checked, capsys.readouterr().out) == ([flags], "")
    bad = config.with_section(ResultsConfig(results_file="/proc/x/y"))
    with pytest.raises(ConfigError, match=r"`--results-file` \(/proc/x/y\) cannot be written"):
        runs.prepare_evaluation(bad)
    monkeypatch.setattr(tool, "inference_rules", lambda given, run: ["another"])
    none = config.with_section(TaskEvaluationConfig(eval_tasks_interval=2))
    assert tool.evaluation_rules(none, none) == [
        "another",
        "`--eval-tasks` is missing; give names of tasks, or YAML files.",
        "`--eval-tasks-interval` is a flag of training; leave it out.",
    ]
    assert tool.evaluation_rules(config, config) == ["another"]


def test_a_rank_that_prints_gets_the_scores_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(objects: list[Any], src: int) -> None:
        assert (objects, src) == ([{}], 0)
        objects[0] = {"tiny acc": 0.25}

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    monkeypatch.setattr(scores, "scored", lambda *_: None)
    callback, records = callback_of(num_iterations=4, interval=2)
    callback.run.progress.iteration = 2
    callback.after_step()
    assert [record.losses for record in records] == [{"tiny acc": 0.25}]


def test_a_chat_template_is_looked_for_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "prepare", lambda config: (config, ByteLevelTokenizer()))
    monkeypatch.setattr(runs, "check_tasks", lambda flags: None)
    config = config_of(SMALL).with_section(TaskEvaluationConfig(eval_tasks=["tiny"]))
    with pytest.raises(ConfigError, match="has no chat template|needs|cannot"):
        runs.prepare_evaluation(config.with_section(ResultsConfig(apply_chat_template=True)))
    runs.prepare_evaluation(config.with_section(ResultsConfig()))
