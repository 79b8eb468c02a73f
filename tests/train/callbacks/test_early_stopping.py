"""Best checkpoints and early stopping, decided alike on every rank and kept over a resume."""

import json
import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.best import BestCheckpoint, with_candidate
from megatron_ext.checkpoint.files import published
from megatron_ext.checkpoint.publish import BEST_TRACKER, expired
from megatron_ext.parallel.recorder import Recorder
from megatron_ext.train.batch_size import Progress
from megatron_ext.train.callbacks import evaluation
from megatron_ext.train.callbacks.callback import EXIT_INTERVAL, Decision, Losses
from megatron_ext.train.callbacks.evaluation import EarlyStopping, mean_validation_loss
from megatron_ext.train.callbacks.evaluation import evaluate as real_evaluate
from megatron_ext.train.reporting.records import EvaluationRecord
from tests.training_runs import (
    LAYOUTS,
    NULL,
    TINY,
    Rows,
    documents,
    mock_data,
    train_on_ranks,
    train_steps,
    without,
)


def script(monkeypatch: pytest.MonkeyPatch, losses: Sequence[float]) -> None:
    """Let the evaluations of the coming runs report these losses, on the last stage only."""
    coming = iter(losses)

    def evaluate(runner: Any, *_: Any, **__: Any) -> tuple[dict[str, float], None]:
        loss = next(coming)
        return ({"lm loss": loss} if runner.context.is_last_stage else {}), None

    monkeypatch.setattr(evaluation, "evaluate", evaluate)


def steps(save: Path, words: str, layout: str = "one", data: Sequence[str] | None = None) -> Rows:
    ranks, more = LAYOUTS[layout]
    flags = without(TINY, "--eval-iters", "--eval-interval", "--split")
    flags += [*(data or [*mock_data(), "--split", "90,10,0"]), "--eval-interval", "2"]
    flags += ["--resume-mode", "auto", *words.split(), *more.split()]
    return train_steps(flags, save, ranks)


KEEP = "--eval-iters 1 --train-iters 12 --save-interval 4 --keep-best 2 --keep-last 1"


@pytest.mark.parametrize(
    ("layout", "parts"),
    [pytest.param("one", (12,), marks=pytest.mark.slow), ("one", (4, 10, 12)), ("dp2", (6, 12))],
)
def test_the_best_checkpoints_stay_and_those_they_supersede_go(
    layout: str, parts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken run does the same; 2, 6 and 8 are gone, 10 is the best, 12 the newest."""
    losses = {2: 5.0, 4: 3.0, 6: 4.0, 8: 6.0, 10: 2.0, 12: 7.0}
    start = 0
    for end in parts:
        coming = [losses[i] for i in range(start + 2, end + 1, 2)]
        script(monkeypatch, [*coming, *[9.0] * 2])
        rows = steps(tmp_path, f"{KEEP} --exit-interval {end}", layout)
        assert rows[-1]["iteration"] == end
        start = end
    assert published(tmp_path) == [4, 10, 12]
    assert (tmp_path / BEST_TRACKER).read_text() == "10 2.0\n"


@pytest.mark.slow
def test_a_best_checkpoint_that_could_not_be_saved_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of 6 with the lowest loss fails; 4 stays the best, and neither is 8."""
    sync = os.fsync

    def fails(descriptor: int) -> None:
        if "/iter_0000006" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    script(monkeypatch, [5.0, 3.0, 2.0, 4.0, 9.0, 9.0, 9.0, 9.0])
    keep = "--eval-iters 1 --train-iters 12 --save-interval 1 --keep-best 1 --keep-last 1"
    steps(tmp_path, f"{keep} --async-save", "dp2")
    assert published(tmp_path) == [4, 12]
    assert (tmp_path / BEST_TRACKER).read_text() == "4 3.0\n"
    (best,) = json.loads((tmp_path / "iter_0000012" / "progress.json").read_text())[
        "best_checkpoints"
    ]
    assert (best["iteration"], best["loss"]) == (4, 3.0)


def test_a_best_loss_after_the_last_step_is_known_to_a_later_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = "--eval-iters 1 --keep-best 1 --keep-last 1 --lr-decay-iters 12"
    script(monkeypatch, [3.0, 2.0, 9.0])
    steps(tmp_path, f"{keep} --train-iters 3 --override-opt-param-scheduler")
    assert (tmp_path / BEST_TRACKER).read_text() == "3 2.0\n"
    # The evaluation after the last step comes after the run, and its samples are not the run's.
    progress = json.loads((tmp_path / "iter_0000003" / "progress.json").read_text())
    assert progress["consumed_valid_samples"] == 16
    script(monkeypatch, [2.5, 2.5, 9.0, 9.0])
    steps(tmp_path, f"{keep} --train-iters 6 --override-opt-param-scheduler")
    assert published(tmp_path) == [3, 6]
    assert (tmp_path / BEST_TRACKER).read_text() == "3 2.0\n"


STOP = "--eval-iters 1 --train-iters 20 --early-stop-patience 2"


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2"])
def test_an_early_stop_saves_and_says_so_on_one_line(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loss that falls by less than the least amount, and one that is no number, do not count."""
    script(monkeypatch, [5.0, 4.0, 3.95, float("nan")])
    rows = steps(tmp_path, f"{STOP} --early-stop-min-delta 0.1", layout)
    assert rows[-1]["iteration"] == 8
    assert published(tmp_path) == [8]
    said = [line for line in capfd.readouterr().out.splitlines() if "early stop" in line]
    assert said == [
        "> exiting at iteration 8 (early stop: the validation loss has not fallen below "
        "4.000000E+00 by more than 0.1 in 2 evaluations)"
    ]


def test_patience_is_kept_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script(monkeypatch, [3.0, 4.0])
    assert steps(tmp_path, f"{STOP} --exit-interval 5")[-1]["iteration"] == 5
    script(monkeypatch, [4.0])
    assert steps(tmp_path, STOP)[-1]["iteration"] == 6
    capfd.readouterr()
    assert steps(tmp_path, STOP)[-1]["iteration"] == 6
    assert "nothing to do at iteration 6 (early stop: the validation" in capfd.readouterr().out
    script(monkeypatch, [2.0, 3.0, 4.0, 5.0])
    assert steps(tmp_path, STOP.replace("patience 2", "patience 3"))[-1]["iteration"] == 14


def test_weights_that_do_not_change_stop_a_real_run(tmp_path: Path) -> None:
    """Whole-split evaluation of unchanged weights gives the same loss to the bit."""
    data = [*NULL, "--data-path", documents(tmp_path / "docs", 40), "--split", "70,30,0"]
    words = "--full-validation --eval-iters 0 --train-iters 20 --lr 0 --min-lr 0"
    rows = steps(tmp_path / "save", f"{words} --early-stop-patience 2", "dp2", data)
    assert rows[-1]["iteration"] == 6


@pytest.mark.parametrize("flag", ["--keep-best", "--early-stop-patience"])
def test_the_validation_loss_needs_a_validation_split(
    flag: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = without(TINY, "--split", "--eval-iters")
    flags += [*NULL, "--data-path", documents(tmp_path / "docs", 20), "--split", "100,0,0"]
    flags += f"--train-iters 2 --eval-iters 1 {flag} 2".split()
    assert train_on_ranks(flags, ranks=2, save=tmp_path / "save")[0] == 2
    assert f"`{flag}` (2) needs a validation split, but this run has none" in capfd.readouterr().err


def test_the_mean_over_sets_is_of_the_first_loss() -> None:
    assert mean_validation_loss([{"lm loss": 1.0, "mtp": 7.0}, {"lm loss": 2.0}]) == 1.5
    for empty in ([], [{}]):
        assert mean_validation_loss(empty) != mean_validation_loss(empty)  # NaN


def test_of_equal_losses_the_earlier_stays() -> None:
    first, second = BestCheckpoint(2, 1.0, False), BestCheckpoint(4, 1.0, False)
    assert with_candidate([first], second, 1) == ([first], [])
    better = BestCheckpoint(6, 0.5, True)
    assert with_candidate([first, second], better, 1) == ([better], [first, second])


@pytest.mark.parametrize(
    ("retain", "keep", "best", "superseded", "gone"),
    [
        (None, None, {2}, {4}, [4]),
        (None, 1, {2}, {6}, [4, 6, 8]),
        (None, 3, {8}, set(), [2]),
        (4, None, {2}, {6}, [6]),
        (4, None, {2}, {4}, []),
        (3, None, {8}, set(), []),
    ],
)
def test_what_goes_when_ten_is_saved(
    retain: int | None, keep: int | None, best: set[int], superseded: set[int], gone: list[int]
) -> None:
    older = [2, 4, 6, 8]
    assert expired(older, retain=retain, keep=keep, best=best, superseded=superseded) == gone


def judge(
    losses: Sequence[float], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Any, list[tuple[Decision, bool]]]:
    """Return the run and the decisions of an evaluation after every second step."""
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: None)
    usual: dict[str, Any] = {"early_stop_patience": None, "early_stop_min_delta": 0.0}
    usual |= {"keep_best": None, "save_retain_interval": None}
    section = SimpleNamespace(**{**usual, **settings})
    said: list[str] = []
    run: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=section, training=section),
        progress=Progress(),
        device=torch.device("cpu"),
        context=SimpleNamespace(reporting_rank=0),
        valid_sources=[None],
        num_iterations=100,
        settle_best=lambda: None,
        reporters=SimpleNamespace(say=said.append),
        best_before=None,
        said=said,
    )
    decided = []
    for number, loss in enumerate(losses, start=1):
        run.progress.iteration = 2 * number
        decision = Decision(save=run.progress.iteration % 4 == 0)
        decided.append((decision, EarlyStopping(run).judge([{"lm loss": loss}], decision)))
    return run, decided


def test_a_loss_counts_as_lower_only_below_the_lowest_and_the_least_amount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, decided = judge([4.0, 4.0, 3.5, 3.0], monkeypatch, early_stop_patience=3)
    assert (run.progress.lowest_loss, run.progress.stale_evaluations) == (3.0, 0)
    run, decided = judge(
        [4.0, 3.5, math.nan, 3.49], monkeypatch, early_stop_patience=3, early_stop_min_delta=0.5
    )
    # 3.5 is lower by exactly the least amount, and 3.49 by more than that.
    assert (run.progress.lowest_loss, run.progress.stale_evaluations) == (3.49, 0)
    run, decided = judge([math.inf, 5.0, 5.0, 6.0, 5.5], monkeypatch, early_stop_patience=3)
    assert (run.progress.lowest_loss, run.progress.stale_evaluations) == (5.0, 3)
    stops = [decision.stop is not None for decision, _ in decided]
    assert stops == [False, False, False, False, True]


def test_an_early_stop_is_a_better_reason_than_the_interval_but_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _ = judge([1.0, 2.0, 2.0], monkeypatch, early_stop_patience=3)
    reasons = []
    for stop in (EXIT_INTERVAL, None, "signal"):
        decision = Decision(stop=stop)
        EarlyStopping(run).judge([{"lm loss": 2.0}], decision)
        reasons.append((decision.stop or "")[:10])
    assert reasons == ["early stop", "early stop", "signal"]


def test_which_checkpoints_a_better_one_supersedes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 4 and 8 are saved for another reason as well, and 2, 6 and 10 are not."""
    losses = [5.0, 4.0, 3.0, 2.0, 2.5, 1.0]
    run, decided = judge(losses, monkeypatch, keep_best=2)
    assert [is_best for _, is_best in decided] == [True] * 6
    assert [decision.superseded for decision, _ in decided] == [(), (), (2,), (), (6,), (10,)]
    assert all(decision.save for decision, _ in decided)
    kept = [(best.iteration, best.regular) for best in run.progress.best_checkpoints]
    assert kept == [(12, True), (8, True)]
    assert [best.iteration for best in run.best_before] == [8, 10]
    # The one with the second lowest loss is kept without words.
    assert len(run.said) == 5
    assert run.said[-1] == "best validation loss so far at iteration 12: 1.000000E+00"
    _, retained = judge(losses, monkeypatch, keep_best=2, save_retain_interval=8)
    assert [decision.superseded for decision, _ in retained] == [
        (), (), (2,), (4,), (6,), (10,),
    ]  # fmt: skip
    # A save that is due anyway stays due after a loss that is not among the best.
    _, worse = judge([1.0, 2.0, 3.0], monkeypatch, keep_best=1)
    assert [decision.save for decision, _ in worse] == [True, True, False]
    _, none = judge([math.nan, 3.0, 4.0], monkeypatch, keep_best=1)
    assert [is_best for _, is_best in none] == [False, True, False]
    assert [decision.save for decision, _ in none] == [False, True, False]


def test_a_best_checkpoint_whose_save_has_failed_is_not_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _ = judge([5.0, 3.0], monkeypatch, keep_best=1)
    (failed,) = run.progress.best_checkpoints
    assert failed.iteration == 4
    run.settle_best = lambda: setattr(run.progress, "best_checkpoints", run.best_before)
    run.progress.iteration = 6
    assert EarlyStopping(run).judge([{"lm loss": 4.0}], Decision())
    assert [best.iteration for best in run.progress.best_checkpoints] == [6]
    assert [best.iteration for best in run.best_before] == [2]


def test_the_last_step_is_saved_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = judge([3.0], monkeypatch, keep_best=2)
    run.num_iterations = run.progress.iteration = 3
    EarlyStopping(run).judge([{"lm loss": 2.0}], Decision())
    assert [best.regular for best in run.progress.best_checkpoints] == [True, False]


@pytest.mark.parametrize(
    ("iteration", "best", "skips", "judged"),
    [
        (5, [], False, True),
        # The evaluation at the interval has judged this step already.
        (6, [], False, False),
        (5, [5], False, False),
        (5, [4], False, True),
        (5, [], True, False),
    ],
)
def test_the_evaluation_at_the_end_judges_what_none_has_judged(
    iteration: int, best: list[int], skips: bool, judged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = judge([], monkeypatch, keep_best=2)
    vars(run.config.training).update(eval_interval=3, skip_train=skips)
    run.progress.iteration = iteration
    run.progress.best_checkpoints = [BestCheckpoint(number, 9.0, False) for number in best]
    saved: list[Any] = []
    run.save = lambda superseded, *, is_last: saved.append((superseded, is_last))
    splits: list[tuple[str, bool]] = []

    def evaluate_split(run: Any, name: str, *, final: bool) -> Losses:
        splits.append((name, final))
        return [{"lm loss": 2.0}]

    monkeypatch.setattr(evaluation, "evaluate_split", evaluate_split)
    evaluation.evaluate_at_end(run)
    assert splits == [("validation", True), ("test", True)]
    assert saved == [((), True)] * judged


def test_each_set_of_a_split_is_evaluated_over_all_its_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps have 8 samples, also while training's are smaller; a set's last step may be partial."""
    calls: list[tuple[Any, int, int, bool]] = []
    records: list[EvaluationRecord] = []
    collected: list[Any] = []

    def evaluate(
        runner: Any, source: Any, steps: int, count: int, *, collects: bool
    ) -> tuple[dict[str, float], Any]:
        calls.append((source, steps, count, collects))
        return {"lm loss": float(steps)}, source

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    sizes = {"a": 16, "b": 17, "test": 8}
    run: Any = SimpleNamespace(
        valid_sources=["a", "b"],
        test_sources=["test"],
        ema=SimpleNamespace(swapped_in=lambda chunks: nullcontext()),
        ema_sources={"validation": ["a", "b"]},
        chunks=[],
        runner=None,
        task=SimpleNamespace(
            process_non_loss_data=lambda *given: collected.append(given), perplexity=False
        ),
        config=SimpleNamespace(logging=SimpleNamespace(tensorboard_dir="board")),
        context=SimpleNamespace(recorder=Recorder()),
        parameter_gather=SimpleNamespace(paused=nullcontext),
        evaluation_samples=sizes.__getitem__,
        evaluation_batch_size=8,
        batch_size=SimpleNamespace(samples_per_microbatch=2, num_microbatches=1),
        progress=Progress(iteration=4, consumed_train_samples=30, consumed_valid_samples=100),
        reporters=SimpleNamespace(writer="writer", on_evaluation=records.append),
    )
    losses = evaluation.evaluate_split(run, "validation")
    assert losses == [{"lm loss": 2.0}, {"lm loss": 3.0}]
    assert calls == [
        ("a", 2, 4, True), ("b", 3, 4, True), ("a", 2, 4, False), ("b", 3, 4, False)
    ]  # fmt: skip
    assert [record.split for record in records] == [
        "validation set 0", "validation set 1", "validation set 0 ema", "validation set 1 ema",
    ]  # fmt: skip
    assert {record.consumed_samples for record in records} == {30}
    assert not any(record.perplexity or record.final for record in records)
    assert collected == [("a", 4, "writer"), ("b", 4, "writer")]
    assert run.progress.consumed_valid_samples == 133
    evaluation.evaluate_split(run, "validation", final=True)
    evaluation.evaluate_split(run, "test")
    assert run.progress.consumed_valid_samples == 133
    assert (records[-1].split, records[-2].final) == ("test", True)


def test_an_evaluation_of_no_steps_collects_nothing() -> None:
    chunk = torch.nn.Dropout()
    modes: list[bool] = []

    def run_step(batches: Any, count: int, **options: Any) -> list[Any]:
        modes.append(chunk.training)
        return ["data"] if options else []

    runner: Any = SimpleNamespace(
        chunks=[chunk],
        context=SimpleNamespace(is_reporting_rank=False, recorder=Recorder()),
        task=SimpleNamespace(non_loss_data=None),
        evaluate=run_step,
    )
    source: Any = SimpleNamespace(num_microbatches=lambda count: count, next_step=lambda count: [])
    assert real_evaluate(runner, source, 0, 2, collects=True) == ({}, [])
    assert real_evaluate(runner, source, 2, 2, collects=True) == ({}, ["data"])
    assert modes == [False] * 3 and chunk.training
