"""The loop calls between steps only what a flag asks for."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.optim.update import UpdateResult
from megatron_ext.parallel.grid import Layout
from megatron_ext.train.batch_size import StepStats
from megatron_ext.train.callbacks.callback import Callback, overridden
from megatron_ext.train.callbacks.evaluation import EarlyStopping
from megatron_ext.train.loop import Sums, callbacks_of
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
}
"""By flags, the callbacks that they need besides `NonFinite`."""


@ranks()
def test_a_run_has_the_callbacks_that_its_flags_need(context: ParallelContext) -> None:
    for words, names in FEATURES.items():
        run = build([*FLAGS, *words.split()], context)
        built = [
            type(each).__name__ for each in callbacks_of(run, EarlyStopping(run), run.runner.settle)
        ]
        assert sorted(built) == sorted([*names, "NonFinite"]), words


@ranks()
def test_a_run_that_saves_or_evaluates_has_callbacks_for_it(
    context: ParallelContext, tmp_path: Path
) -> None:
    words = f"--save {tmp_path} --save-interval 2 --eval-iters 1 --eval-interval 2"
    run = build([*FLAGS, *words.split()], context)
    built = [
        type(each).__name__ for each in callbacks_of(run, EarlyStopping(run), run.runner.settle)
    ]
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
