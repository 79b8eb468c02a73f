"""The loop calls between steps only what a flag asks for."""

import math
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config.output import LoggingConfig
from megatron_ext.optim.update import UpdateResult
from megatron_ext.parallel.grid import Layout
from megatron_ext.train import loop
from megatron_ext.train.batch_size import Progress, StepStats
from megatron_ext.train.callbacks.callback import Callback, Decision, overridden
from megatron_ext.train.loop import IntervalMetrics, Sums, callbacks_of, count_step
from megatron_ext.train.reporting.records import IterationRecord
from megatron_ext.train.step import StepResult, means_of, reduce_step
from tests.ranks import ParallelContext, ranks, run_on_ranks
from tests.runs_from_inside import build
from tests.training_runs import TINY, mock_data

FLAGS = [*TINY, *mock_data(), "--train-iters", "4"]
FEATURES = {
    "": [],
    "--ema-decay 0.9": ["WeightAverage"],
    "--check-invariants 2 --manual-gc": ["Invariants", "GarbageCollection"],
    "--exit-interval 3 --on-spike log": ["Spikes", "StopConditions"],
    "--check-state-interval 2 --profile": ["StepProfiler", "RestingState"],
    "--profile --profile-ranks 1": [],
}
"""By flags, the callbacks that they need besides `NonFinite`."""


@ranks()
def test_a_run_has_the_callbacks_that_its_flags_need(context: ParallelContext) -> None:
    for words, names in FEATURES.items():
        run = build([*FLAGS, *words.split()], context)
        built = [type(each).__name__ for each in callbacks_of(run, None, run.runner.settle)]
        assert sorted(built) == sorted([*names, "NonFinite"]), words


@ranks()
def test_a_run_that_saves_or_evaluates_has_callbacks_for_it(
    context: ParallelContext, tmp_path: Path
) -> None:
    words = f"--save {tmp_path} --save-interval 2 --eval-iters 1 --eval-interval 2"
    run = build([*FLAGS, *words.split()], context)
    early_stopping = loop.early_stopping_of(run)
    built = [type(each).__name__ for each in callbacks_of(run, early_stopping, run.runner.settle)]
    assert [name for name in built if name != "DataLedger"] == [
        "NonFinite", "Evaluation", "StopConditions", "EarlyStopping", "SaveWatch",
    ]  # fmt: skip


def test_only_overridden_methods_are_called() -> None:
    class Idle(Callback):
        pass

    class Works(Idle):
        def after_step(self) -> None:
            raise AssertionError("called")

    run: Any = None
    callbacks = [Idle(run), Works(run)]
    assert overridden(callbacks, "before_step") == []
    (call,) = overridden(callbacks, "after_step")
    with pytest.raises(AssertionError, match="called"):
        call()


def check_one_reduction(context: ParallelContext) -> None:
    """Each rank reports the loss 3 and 5 of 2 and 4 targets; stages before the last report none."""
    last = context.is_last_stage
    numbers = torch.tensor([[3.0, 2.0], [5.0, 4.0]])
    reports = [{"lm loss": row} for row in numbers] if last else []
    targets = torch.tensor(6 if last else 0, dtype=torch.int)
    with mock.patch("torch.distributed.all_reduce", wraps=torch.distributed.all_reduce) as reduce:
        totals, scale = reduce_step(reports, targets, context)
    replicas = context.pgs.dp_cp.size()
    assert reduce.call_count == int(last)
    assert scale is not None and scale.dtype == torch.float32
    assert float(scale) == pytest.approx(1 / (6 * replicas))
    assert [x.tolist() for x in totals.values()] == ([[8.0 * replicas, 6.0 * replicas]] * last)
    assert reduce_step(reports, None, context)[1] is None


def test_losses_and_targets_of_a_step_are_reduced_together() -> None:
    run_on_ranks(check_one_reduction, Layout(world_size=4, pipeline_model_parallel_size=2), {})


@pytest.mark.parametrize("value", [7.0, math.nan])
def test_the_mean_loss_of_an_interval_leaves_skipped_steps_out(value: float) -> None:
    sums = Sums()
    for loss, applied in ((3.0, True), (value, False), (4.0, True)):
        update = UpdateResult(torch.tensor(applied), torch.tensor(1.0, dtype=torch.float64))
        count = {"lm loss": torch.tensor(8.0)}
        result = StepResult({"lm loss": torch.tensor(loss)}, count, update, update)
        sums.add(result, StepStats(4, 32, 1e6))
    assert means_of(sums.losses) == {"lm loss": 3.5}
    assert (sums.steps, sums.samples) == (3, 12)


@ranks()
def test_a_step_without_targets_leaves_the_gradients_as_they_are(context: ParallelContext) -> None:
    zero = torch.zeros(2)
    targets = torch.zeros((), dtype=torch.int)
    _, scale = reduce_step([{"lm loss": zero}], targets, context)
    assert float(scale) == 1.0  # type: ignore[arg-type]


def result_of(
    losses: dict[str, float],
    counts: dict[str, float] | None = None,
    *,
    applied: bool = True,
    norm: float = 1.0,
    flops: float | None = None,
) -> StepResult:
    update = UpdateResult(torch.tensor(applied), torch.tensor(norm, dtype=torch.float64))
    given = counts or dict.fromkeys(losses, 8.0)
    return StepResult(
        {name: torch.tensor(loss) for name, loss in losses.items()},
        {name: torch.tensor(count) for name, count in given.items()},
        update,
        update,
        flops,
    )


class Reports:
    """Keeps what it is given to report."""

    def __init__(self) -> None:
        self.records: list[IterationRecord] = []
        self.steps: list[IterationRecord] = []
        self.said: list[str] = []
        self.reason = "finished"

    def on_iteration(self, record: IterationRecord) -> None:
        self.records.append(record)

    def on_step(self, record: IterationRecord) -> None:
        self.steps.append(record)

    def say(self, text: str) -> None:
        self.said.append(text)


class Metered:
    """Takes made-up steps of a run, each in a given time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **logging: Any) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(loop, "Sums", lambda: Sums(start=self.now))
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
        usual = {"log_interval": 3, "tensorboard_log_interval": 2}
        self.reports = Reports()
        self.progress = Progress()
        self.run: Any = SimpleNamespace(
            progress=self.progress,
            config=SimpleNamespace(
                logging=LoggingConfig(**{**usual, **logging}),
                checkpoint=SimpleNamespace(save="here"),
            ),
            num_iterations=50,
            runner=SimpleNamespace(settle=lambda: None, settled=True, attention_logits=None),
            reporters=self.reports,
            batch_size=SimpleNamespace(global_batch_size=99),
            optimizer=SimpleNamespace(
                param_groups=[{"lr": 0.1, "default_config": True}], get_loss_scale=lambda: 4.0
            ),
            context=SimpleNamespace(
                pgs=SimpleNamespace(pp=None), layout=SimpleNamespace(world_size=3)
            ),
            task=SimpleNamespace(sample_name="images"),
            device=torch.device("cpu"),
            peak_flops=1e12,
            saves=SimpleNamespace(num_failed=2),
            params_norm=lambda: 6.5,
            parameter_gather=SimpleNamespace(switch_on=lambda: None),
            train_source=SimpleNamespace(plan=None),
        )
        self.metrics = IntervalMetrics(self.run)

    def step(
        self, result: StepResult, seconds: float = 1.0, samples: int = 4, pause: float = 0.0
    ) -> None:
        self.now += seconds
        count_step(self.run, self.metrics, result, StepStats(samples, 8 * samples, 2e12))
        self.metrics.report_if_due()
        self.now += pause
        self.metrics.pause(pause)


def test_a_report_holds_the_means_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is reported alone, and counts again in the next printed line."""
    run = Metered(monkeypatch)
    run.step(result_of({"lm loss": 9.0}), seconds=5.0, pause=7.0)
    run.step(result_of({"lm loss": 3.0}), seconds=2.0, samples=6, pause=11.0)
    run.step(result_of({"lm loss": 6.0}, norm=0.5, flops=5e12), seconds=4.0, samples=2)
    first, second = run.reports.records
    assert run.reports.steps == []
    assert (first.iteration, first.seconds, first.losses) == (1, 5.0, {"lm loss": 9.0})
    assert first.printed is None
    assert (second.iteration, second.seconds, second.losses) == (3, 3.0, {"lm loss": 4.5})
    assert (second.samples, second.tokens, second.flops) == (4.0, 32.0, 3.5e12)
    assert (second.global_batch_size, second.consumed_samples, second.grad_norm) == (2, 12, 0.5)
    assert second.learning_rate == float(torch.tensor(0.1))
    assert (second.loss_scale, second.world_size, second.failed_saves) == (4.0, 3, 2)
    assert (second.num_iterations, second.sample_name) == (50, "images")
    assert (second.peak_flops, second.params_norm) == (1e12, None)
    printed = second.printed
    assert printed is not None
    assert (printed.seconds, printed.losses) == (11 / 3, {"lm loss": 6.0})
    assert (printed.samples, printed.tokens, printed.flops) == (4.0, 32.0, 3e12)
    for loss in (1.0, 2.0, 3.0):
        run.step(result_of({"lm loss": loss}))
    third = run.reports.records[2]
    assert (third.losses, third.printed, third.seconds) == ({"lm loss": 2.0}, None, 1.0)
    assert run.progress.floating_point_operations == 2e12 * 5 + 5e12


def test_skipped_steps_and_empty_losses_are_left_out_of_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Metered(monkeypatch, tensorboard_dir="board")
    nan = {"lm loss": math.nan, "rare loss": 0.0}
    run.step(result_of(nan, applied=False, norm=math.nan))
    run.step(result_of({"lm loss": 3.0, "rare loss": 0.0}, {"lm loss": 8.0, "rare loss": 0.0}))
    run.step(result_of({"lm loss": 5.0, "rare loss": 7.0}, applied=False, norm=math.inf))
    first, second = run.reports.records
    # All steps were skipped: there is only the loss of the last one.
    assert math.isnan(first.losses["lm loss"])
    assert (first.skipped, first.nans, first.total_skipped) == (1, 1, 1)
    assert second.losses == {"lm loss": 3.0}
    assert (second.skipped, second.nans, second.total_skipped) == (1, 0, 2)
    assert second.printed is not None
    assert (second.printed.skipped, second.printed.nans) == (2, 1)
    assert (run.progress.skipped_iterations, run.progress.nan_iterations) == (2, 1)
    assert run.reports.said == [
        "iteration 1 was skipped: its gradient norm is nan (1 skipped so far)",
        "iteration 3 was skipped: its gradient norm is inf (2 skipped so far)",
    ]
    # The board gets step 2 alone, without the loss that no sample had, and both steps' skips.
    (board,) = run.reports.steps
    assert (board.iteration, board.losses, board.skipped, board.nans) == (2, {"lm loss": 3.0}, 1, 1)


def test_boards_get_single_steps_with_the_mean_time_since_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Metered(monkeypatch, trackio_project="p", log_params_norm=True)
    for seconds, loss in ((1.0, 9.0), (3.0, 8.0), (4.0, 7.0), (6.0, 6.0), (1.0, 5.0), (2.0, 4.0)):
        run.step(result_of({"lm loss": loss}), seconds=seconds, pause=20.0)
    singles = run.reports.steps
    assert [(x.iteration, x.seconds, x.losses["lm loss"]) for x in singles] == [
        (2, 2.0, 8.0),
        (4, 5.0, 6.0),
        (6, 1.5, 4.0),
    ]
    assert [x.params_norm for x in singles] == [6.5] * 3
    assert [record.iteration for record in run.reports.records] == [1, 3, 6]
    assert [record.seconds for record in run.reports.records] == [1.0, 3.5, 3.0]


class Moments(Callback):
    """Notes each moment, and decides what the test says for a step."""

    def __init__(self, run: Any, decisions: dict[int, Decision]) -> None:
        super().__init__(run)
        self.decisions = decisions

    def after_update(self, result: StepResult) -> None:
        self.run.events.append(f"updated {self.run.progress.iteration}")

    def decide(self, decision: Decision) -> None:
        vars(decision).update(vars(self.decisions.get(self.run.progress.iteration, Decision())))

    def after_save(self) -> None:
        self.run.events.append(f"after save {self.run.progress.iteration}")

    def on_train_end(self) -> None:
        self.run.events.append("end")


def looped(
    monkeypatch: pytest.MonkeyPatch,
    decisions: dict[int, Decision],
    *,
    sizes: dict[int, bool] | None = None,
    **changes: Any,
) -> tuple[int | None, Any]:
    """Return what the loop returns for steps that do nothing, and its run with the events."""
    events: list[str] = []
    pauses: list[float] = []
    progress = Progress()
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def save(superseded: Any, *, is_last: bool) -> bool:
        now[0] += 3.0
        events.append(f"save {progress.iteration}" + " at the end" * is_last)
        return True

    def update(consumed: int) -> bool:
        return bool(sizes and sizes.get(consumed))

    def count(run: Any, *_: Any) -> None:
        progress.advance(StepStats(1, 1, 1.0), None)

    checkpoint = SimpleNamespace(save="here", save_interval=None)
    run: Any = SimpleNamespace(
        events=events,
        pauses=pauses,
        progress=progress,
        num_iterations=3,
        saved_at=0,
        save=save,
        config=SimpleNamespace(checkpoint=checkpoint, training=SimpleNamespace(evaluates=False)),
        valid_sources=[],
        reporters=Reports(),
        batch_size=SimpleNamespace(changes=sizes is not None, update=update, global_batch_size=4),
        runner=SimpleNamespace(train=lambda *_: None),
    )
    vars(run).update(changes)
    if isinstance(run.saved_at, tuple):
        run.saved_at, progress.iteration, checkpoint.save_interval = run.saved_at
    monkeypatch.setattr(loop, "callbacks_of", lambda *_: [Moments(run, decisions)])
    monkeypatch.setattr(loop, "next_inputs", lambda run: (None, None))
    monkeypatch.setattr(loop, "count_step", count)
    metrics = SimpleNamespace(
        settle=lambda: events.append("settled"),
        report_if_due=lambda: None,
        pause=pauses.append,
    )
    monkeypatch.setattr(loop, "IntervalMetrics", lambda run: metrics)
    return loop.train(run), run


def steps(*numbers: int) -> list[str]:
    return [word for i in numbers for word in (f"updated {i}", f"after save {i}")]


def test_a_run_saves_once_at_its_end_after_the_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    code, run = looped(monkeypatch, {})
    assert code is None
    assert run.events == [*steps(1, 2, 3), "end", "settled", "save 3 at the end"]
    assert (run.saved_at, run.reporters.reason) == (3, "finished")


def test_a_decision_saves_or_ends_a_run_after_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = {1: Decision(save=True), 2: Decision(stop="the clock", exit_code=0)}
    code, run = looped(monkeypatch, decisions)
    # An end with the code 0 is an early one all the same.
    assert code == 0
    saved = [["updated 1", "settled", "save 1", "after save 1"]]
    saved.append(["updated 2", "settled", "save 2", "after save 2"])
    assert run.events == [*saved[0], *saved[1], "end"]
    # The time of a save is none of the step's.
    assert run.pauses == [3.0, 3.0]
    assert run.reporters.reason == "the clock"
    assert run.reporters.said == ["exiting at iteration 2 (the clock)"]


def test_a_run_saves_before_its_batch_size_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start there is nothing to save yet."""
    _, run = looped(monkeypatch, {}, sizes={0: True, 2: True})
    assert run.events == [
        *steps(1, 2), "settled", "save 2", *steps(3), "end", "settled", "save 3 at the end",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("saved_at", "again"),
    [((0, 2, 2), True), ((1, 2, 2), True), ((2, 2, 2), False), ((2, 3, 2), False),
     ((0, 1, 2), False), ((0, 2, None), False)],
)  # fmt: skip
def test_a_save_that_a_fault_has_interrupted_is_made_up_for(
    saved_at: tuple[int, int, int | None], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = looped(monkeypatch, {}, saved_at=saved_at, num_iterations=saved_at[1])
    assert (run.events[0] == "settled") is again


def test_a_save_of_an_earlier_step_after_a_return_to_it_is_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, run = looped(monkeypatch, {}, saved_at=5)
    assert run.events[-1] == "save 3 at the end"


def test_a_run_whose_patience_is_over_saves_and_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress = Progress(iteration=2, stale_evaluations=4, lowest_loss=1.0)
    saved: list[bool] = []
    training = SimpleNamespace(evaluates=True, early_stop_patience=4, early_stop_min_delta=0.0)
    checkpoint = SimpleNamespace(save="here", save_interval=None, keep_best=None)
    code, run = looped(
        monkeypatch,
        {},
        progress=progress,
        saved_at=0,
        save=lambda _, is_last: bool(saved.append(is_last)) or True,
        valid_sources=[None],
        config=SimpleNamespace(checkpoint=checkpoint, training=training),
    )
    assert (code, saved, run.saved_at) == (0, [True], 2)
    (said,) = run.reporters.said
    assert said.startswith("nothing to do at iteration 2 (early stop: the validation loss")


def test_a_step_is_recorded_under_its_own_number_with_its_length() -> None:
    numbers: list[int] = []
    recorder = SimpleNamespace(step=numbers.append, phase=lambda name: nullcontext())
    source = SimpleNamespace(
        seq_length_of=lambda consumed: consumed * 10,
        plan=object(),
        num_microbatches=lambda number: number + 1,
        next_step=lambda number, length: [number, length],
    )
    stats = StepStats(1, 2, 3.0)
    run: Any = SimpleNamespace(
        context=SimpleNamespace(recorder=recorder),
        progress=Progress(iteration=6, consumed_train_samples=24),
        train_source=source,
        batch_size=SimpleNamespace(num_microbatches=2),
        seq_length=None,
        task=SimpleNamespace(step_stats=lambda run, number: stats if number == 3 else None),
    )
    inputs, found = loop.next_inputs(run)
    assert numbers == [7]
    assert (inputs.batches, inputs.num_microbatches) == ([3, 240], 3)
    assert (inputs.consumed_samples, inputs.seq_length, run.seq_length) == (24, 240, 240)
    assert found is stats
