"""A step that is not finite is told with its ranks and its first bad parameter."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.disk.events import read_events
from megatron_ext.extras.resilience.spikes import Spikes
from megatron_ext.optim.builder import choose_kernels
from megatron_ext.train.batch_size import Progress
from megatron_ext.train.callbacks.diagnosis import NotFinite, announce, describe, places
from megatron_ext.train.callbacks.non_finite import NonFinite
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
    context = SimpleNamespace(layout=layout_of(dp=4096))
    assert places(range(3000), context) == (
        "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 2,984 more"
    )


def test_what_is_not_finite_is_put_into_words() -> None:
    context: Any = SimpleNamespace(layout=layout_of(tp=2))
    nothing = NotFinite.of(0, [], loss=False)
    facts = describe([], float("inf"), context)
    assert (facts["cause"], facts["ranks"]) == ("norm", [])
    assert facts["sentence"].startswith("its gradient norm is inf, though each")
    few, many = NotFinite.of(1, ["b"], loss=False), NotFinite.of(0, ["a", "b"], loss=False)
    facts = describe([few, many], float("nan"), context)
    assert (facts["cause"], facts["ranks"], facts["parameter"]) == ("gradient", [1], "b")
    facts = describe([nothing, NotFinite.of(1, [], loss=True)], float("nan"), context)
    assert (facts["cause"], facts["ranks"], facts["parameter"]) == ("loss", [1], None)
    assert facts["sentence"] == "the loss is not finite on rank 1 (tensor 1)"
    context = SimpleNamespace(layout=layout_of(cp=2, pp=2))
    facts = describe([NotFinite.of(2, ["w"], loss=False)], float("nan"), context)
    assert facts["sentence"] == (
        "the gradient of `w` (in the sum over the replicas) first, on rank 2 (context 0, "
        "pipeline 1); the loss is finite"
    )
    context = SimpleNamespace(layout=layout_of(pp=2))
    both = [NotFinite.of(1, ["w"], loss=True), NotFinite.of(0, ["v", "w"], loss=False)]
    facts = describe(both, float("nan"), context)
    assert facts["sentence"] == ("the gradient of `w` first, on rank 1 (pipeline 1); the loss too")
    assert facts["cause"] == "loss"


def test_an_event_names_a_rank_only_if_it_is_the_only_one(tmp_path: Path) -> None:
    said: list[str] = []
    run: Any = SimpleNamespace(
        reporters=SimpleNamespace(say=said.append),
        context=SimpleNamespace(is_reporting_rank=True),
        config=SimpleNamespace(checkpoint=SimpleNamespace(save=str(tmp_path))),
    )
    for ranks_ in ([2], [2, 3], []):
        announce(run, "non_finite", "It is odd.", ranks=ranks_)
    run.context.is_reporting_rank = False
    announce(run, "non_finite", "It is odd.", ranks=[1])
    assert [event.get("rank") for event in read_events(tmp_path)] == [2, None, None]
    assert said == ["It is odd."] * 4


def test_a_late_report_is_made_once_and_also_after_the_last_step() -> None:
    told: list[tuple[int, str | None, bool]] = []
    run: Any = SimpleNamespace(
        progress=Progress(iteration=4),
        runner=SimpleNamespace(settled=False),
        context=SimpleNamespace(rank=0),
    )

    class Told(NonFinite):
        def _tell(self, iteration: int, update: Any, here: NotFinite) -> None:
            told.append((iteration, here.parameter, here.loss))

    reporter = Told(run)
    reporter._names = [["a", "b"], ["c"]]
    sizes = [torch.tensor([1.0, float("inf")]), torch.tensor([2.0])]
    bad = SimpleNamespace(applied=False, grad_norm=float("inf"), sizes=sizes)
    good = SimpleNamespace(applied=True, grad_norm=1.0, sizes=sizes)
    loss = {"lm loss": torch.tensor(float("nan"))}
    reporter.after_update(SimpleNamespace(update=bad, losses=loss))  # type: ignore[arg-type]
    assert told == []
    run.progress.iteration = 5
    reporter.after_update(SimpleNamespace(update=good, losses={}))  # type: ignore[arg-type]
    assert told == [(4, "b", True)]
    run.progress.iteration = 6
    reporter.after_update(SimpleNamespace(update=bad, losses={}))  # type: ignore[arg-type]
    reporter.on_train_end()
    reporter.on_train_end()
    assert told == [(4, "b", True), (6, "b", False)]


@pytest.mark.parametrize(
    ("rerun", "fp16", "tells"),
    [("disabled", False, True), ("disabled", True, False), ("validate_results", False, False)],
)
def test_who_reports_steps_that_are_not_finite(rerun: str, fp16: bool, tells: bool) -> None:
    config: Any = SimpleNamespace(
        fault_tolerance=SimpleNamespace(rerun_mode=rerun), precision=SimpleNamespace(fp16=fp16)
    )
    assert NonFinite.tells(config) is tells


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
