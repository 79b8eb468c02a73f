"""A step that is not finite is told with its ranks and its first bad parameter."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.extras.resilience.spikes import Spikes
from megatron_ext.optim.builder import choose_kernels
from megatron_ext.train.callbacks.non_finite import NonFinite, NotFinite, describe, places
from megatron_ext.train.loop import IntervalMetrics, count_step, next_inputs
from megatron_ext.train.run import Run
from tests.extras.resilience.silent_faults import FLAGS, NO_DROPOUT, Spoiler, run_with
from tests.host_syncs import READ, host_syncs
from tests.ranks import ParallelContext, layout_of, ranks
from tests.runs_from_inside import build


def test_ranks_are_told_with_the_positions_that_they_share() -> None:
    context: Any = SimpleNamespace(layout=layout_of(tp=2, pp=2, dp=2))
    assert places([3], context) == "rank 3 (data 1, tensor 1, pipeline 0)"
    assert places([4, 5], context) == "ranks 4, 5 (data 0, pipeline 1)"
    assert places([0, 7], context) == "ranks 0, 7"


def test_what_is_not_finite_is_put_into_words() -> None:
    context: Any = SimpleNamespace(layout=layout_of(tp=2))
    nothing = NotFinite(0, [], loss=False)
    facts = describe([], float("inf"), context)
    assert (facts["cause"], facts["ranks"]) == ("norm", [])
    assert facts["sentence"].startswith("its gradient norm is inf, though each")
    few, many = NotFinite(1, ["b"], loss=False), NotFinite(0, ["a", "b"], loss=False)
    facts = describe([few, many], float("nan"), context)
    assert (facts["cause"], facts["ranks"], facts["parameter"]) == ("gradient", [1], "b")
    facts = describe([nothing, NotFinite(1, [], loss=True)], float("nan"), context)
    assert (facts["cause"], facts["ranks"], facts["parameter"]) == ("loss", [1], None)
    assert facts["sentence"] == "the loss is not finite on rank 1 (tensor 1)"


@pytest.mark.parametrize(
    ("words", "rank", "wanted"),
    [
        ("--tensor-model-parallel-size 2", 1, [1]),
        ("--pipeline-model-parallel-size 2 --bf16", 1, [1]),
        # Each rank of the distributed optimizer knows its own part of the reduced gradients.
        ("", 0, [1]),
    ],
)
def test_a_device_that_decides_tells_one_step_later(
    words: str, rank: int, wanted: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The update of a fused optimizer is read late, as on a GPU, when its gradients are gone."""
    spoiler = Spoiler("layers.0.mlp.linear_fc1", rank, iteration=5)

    def prepare(run: Run) -> None:
        choose_kernels(run.optimizer, fused=True)  # type: ignore[arg-type]
        spoiler(run)

    ended = run_with(words, tmp_path, 2, prepare=prepare)
    (event,) = ended.events
    assert (event["kind"], event["iteration"], event["ranks"]) == ("non_finite", 5, wanted)
    assert event["parameter"].endswith("layers.0.mlp.linear_fc1.weight")
    assert "> iteration 5 is not finite: the gradient of `module" in capfd.readouterr().out


@ranks(pp=2)
def test_all_stages_count_a_loss_that_is_not_finite(context: ParallelContext) -> None:
    """Rank 0 writes the count into checkpoints, but only the last stage has the loss."""
    run = build([*FLAGS, *NO_DROPOUT.split(), "--pipeline-model-parallel-size", "2"], context)
    metrics = IntervalMetrics(run)
    if context.is_last_stage:
        with torch.no_grad():
            next(iter(run.chunks[-1].parameters())).fill_(float("nan"))
    inputs, stats = next_inputs(run)
    result = run.runner.train(inputs, run.batch_size.global_batch_size)
    count_step(run, metrics, result, stats)
    metrics.settle()
    assert (run.progress.skipped_iterations, run.progress.nan_iterations) == (1, 1)


@ranks()
def test_looking_for_faults_makes_no_healthy_step_wait(context: ParallelContext) -> None:
    run = build([*FLAGS, *NO_DROPOUT.split(), "--on-spike", "log"], context)
    choose_kernels(run.optimizer, fused=True)  # type: ignore[arg-type]
    callbacks, metrics = [NonFinite(run), Spikes(run)], IntervalMetrics(run)

    def step() -> None:
        for callback in callbacks:
            callback.before_step()
        inputs, stats = next_inputs(run)
        result = run.runner.train(inputs, run.batch_size.global_batch_size)
        count_step(run, metrics, result, stats)
        for callback in callbacks:
            callback.after_update(result)

    step()
    with host_syncs() as seen:
        step()
    assert set(seen) == {READ}
    assert not run.runner.settled
