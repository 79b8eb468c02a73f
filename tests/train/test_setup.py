"""A run builds and reads this at its start, and goes on here after a checkpoint."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.state import LoadedCheckpoint
from megatron_ext.optim import resumed_schedule
from megatron_ext.train import setup as module
from megatron_ext.train.batch_size import Progress
from megatron_ext.train.setup import (
    _background,
    _continue_schedules,
    _follow_new_weights,
    _progress_after,
    _saves,
    attach_data,
)
from tests.training_runs import SMALL, config_of

CPU = torch.device("cpu")


class Attached:
    """A run whose datasets are words and whose sources say how they were made."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        words: str = "",
        *,
        iteration: int = 0,
        missing: tuple[str, ...] = (),
        rank: int = 0,
        **progress: Any,
    ) -> None:
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
        monkeypatch.setattr(module, "reads_dataset", lambda *_: True)
        self.plan: Any = None
        self.sources: list[str] = []
        self.config = config_of([*SMALL, *words.split()])
        named: dict[str, Any] = {"train": "train", "valid": "valid", "test": "test"}
        named |= dict.fromkeys(missing)
        self.datasets = SimpleNamespace(**named)
        self.run: Any = SimpleNamespace(
            config=self.config,
            context=SimpleNamespace(layout=SimpleNamespace(data_parallel_size=1), rank=rank),
            device=CPU,
            progress=Progress(iteration=iteration, **progress),
            num_iterations=4,
            train_source=SimpleNamespace(plan=None),
        )
        self.task: Any = SimpleNamespace(datasets=lambda *_: self.datasets, source=self.source)

    def source(self, run: Any, dataset: str, assets: Any, consumed: int, full: bool) -> Any:
        said = f"{dataset} from {consumed}" + " whole" * full
        torch.rand(1)
        self.sources.append(said)
        return SimpleNamespace(said=said, plan=self.plan)

    def attach(self) -> list[str]:
        attach_data(self.run, self.task, None)
        return self.sources


@pytest.mark.parametrize(
    ("words", "iteration", "made"),
    [
        ("", 2, ["train from 8", "valid from 5", "test from 0"]),
        # A complete run reads no training data, but it may evaluate.
        ("", 4, ["valid from 5", "test from 0"]),
        ("--full-validation", 2, ["train from 8", "valid from 0 whole", "test from 0"]),
        ("--skip-train", 2, ["valid from 0", "test from 0"]),
        ("--full-validation --eval-iters 0", 2, ["train from 8", "valid from 0 whole"]),
        ("--eval-iters 0", 2, ["train from 8"]),
    ],
)
def test_where_each_split_is_read_from(
    words: str, iteration: int, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = Attached(
        monkeypatch,
        words,
        iteration=iteration,
        consumed_train_samples=8,
        consumed_valid_samples=5,
    )
    assert attached.attach() == made


def test_splits_that_no_rank_has_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    attached = Attached(monkeypatch, missing=("valid", "test"))
    assert attached.attach() == ["train from 0"]
    assert attached.run.valid_sources == attached.run.test_sources == []
    # This rank reads nothing, but another one does.
    elsewhere = Attached(monkeypatch, missing=("valid", "test"))

    def with_another(found: torch.Tensor, op: Any) -> None:
        found.fill_(max(int(found), 1) if op == torch.distributed.ReduceOp.MAX else 0)

    monkeypatch.setattr(torch.distributed, "all_reduce", with_another)
    assert elsewhere.attach() == ["train from 0", "None from 0", "None from 0"]
    several = Attached(monkeypatch)
    several.datasets.valid = ["a", "b"]
    assert several.attach() == ["train from 0", "a from 0", "b from 0", "test from 0"]


def test_averages_are_evaluated_on_the_same_samples_without_further_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = []
    for words in ("", "--ema-decay 0.9 --eval-ema"):
        torch.manual_seed(3)
        attached = Attached(monkeypatch, words, consumed_valid_samples=6)
        made = attached.attach()
        states.append(torch.get_rng_state())
    assert made == ["train from 0", *["valid from 6", "test from 0"] * 2]
    assert attached.run.ema_sources.keys() == {"validation", "test"}
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("before", "rank", "told"), [("old", 0, True), ("old", 1, False), ("", 0, False),
                                 ("new", 0, False)],
)  # fmt: skip
def test_other_samples_than_those_of_the_checkpoint_are_told(
    before: str,
    rank: int,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    attached = Attached(monkeypatch, rank=rank, data_plan=before)
    attached.plan = SimpleNamespace(identity="new")
    attached.attach()
    assert ("are not those of the checkpoint" in capsys.readouterr().out) is told
    assert attached.run.progress.data_plan == "new"


@pytest.mark.parametrize("notes", [None, [], ["weights of b"]])
def test_optimizer_and_averages_follow_weights_that_the_task_has_set(
    notes: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []
    optimizer: Any = SimpleNamespace(reload_model_params=lambda: events.append("optimizer"))
    ema: Any = SimpleNamespace(restart=lambda: events.append("average"))
    for rank in (0, 1):
        _follow_new_weights(notes, optimizer, ema, SimpleNamespace(rank=rank))  # type: ignore[arg-type]
    assert events == ["optimizer", "average"] * 2 * (notes is not None)
    assert capsys.readouterr().out == "".join(f"> {note}\n" for note in notes or ())
    _follow_new_weights(notes, None, None, SimpleNamespace(rank=0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("notes", "rank", "said"),
    [
        (["the rate goes on", "a critic's rate"], 0, "> the rate goes on\n"),
        (["the rate goes on"], 1, ""),
        ([None, "a critic's rate"], 0, ""),
        ([], 0, ""),
    ],
)
def test_all_schedules_go_on_and_the_note_on_the_models_is_said_once(
    notes: list[str | None],
    rank: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone_on: list[Any] = []

    def go_on(note: str | None, config: Any, iteration: int, consumed: int) -> str | None:
        gone_on.append((config, iteration, consumed))
        return note

    monkeypatch.setattr(resumed_schedule, "go_on", go_on)
    runner: Any = SimpleNamespace(schedules=notes)
    progress = {"iteration": 9, "consumed_train_samples": 28}
    loaded: Any = SimpleNamespace(progress=progress, iteration=7)
    config: Any = "config"
    _continue_schedules(runner, config, loaded, SimpleNamespace(rank=rank))  # type: ignore[arg-type]
    assert gone_on == [("config", 7, 28)] * len(notes)
    assert capsys.readouterr().out == said


def test_a_run_says_what_it_has_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    def progress(rank: int, iteration: int) -> Progress:
        stored = {"iteration": 7, "consumed_train_samples": 28}
        path = Path("/runs/iter_0000007")
        loaded = LoadedCheckpoint(iteration, stored, {}, path, ["a note"])
        return _progress_after(loaded, SimpleNamespace(rank=rank))  # type: ignore[arg-type]

    assert progress(0, 7).iteration == 7
    assert progress(0, 0).iteration == 0
    assert progress(1, 7).consumed_train_samples == 28
    assert _progress_after(None, SimpleNamespace(rank=0)) == Progress()  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines() == [
        "> loaded /runs/iter_0000007 (iteration 7)",
        "> a note",
        "> loaded /runs/iter_0000007 (its weights)",
        "> a note",
    ]


@pytest.mark.parametrize(
    ("words", "tolerant"), [("", False), ("--async-save", True), ("--max-restarts 1", True)]
)
def test_which_runs_go_on_after_a_failed_save(words: str, tolerant: bool, tmp_path: Path) -> None:
    config = config_of([*SMALL, *words.split(), "--save", str(tmp_path)])
    context: Any = SimpleNamespace(rank=2)
    saves = _saves(config, context, None)
    assert (saves._tolerant, saves._folder, saves._rank) == (tolerant, str(tmp_path), 2)


def test_background_saves_have_the_time_limit_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(
        "megatron_ext.checkpoint.background.BackgroundSaves",
        lambda *_, seconds: limits.append(seconds),
    )
    config = config_of(SMALL)
    parallel = dataclasses.replace(config.parallel, distributed_timeout_minutes=2.5)
    config = dataclasses.replace(config, parallel=parallel)
    context: Any = None
    helper: Any = "helper"
    _background(config, context, CPU, helper)
    assert limits == [150.0]
    assert _background(config, context, CPU, None) is None
