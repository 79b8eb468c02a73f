"""Steps that are judged, computed again or gone back from, with a run that a test makes up."""

import math
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.fault_tolerance import FaultToleranceConfig
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import MachineFault
from megatron_ext.extras.resilience import replay as replay_module
from megatron_ext.extras.resilience import rerun as rerun_module
from megatron_ext.extras.resilience import resting_state as resting_module
from megatron_ext.extras.resilience import rewind as rewind_module
from megatron_ext.extras.resilience import spikes as spikes_module
from megatron_ext.extras.resilience.replay import Outcome, StepStart, digests
from megatron_ext.extras.resilience.rerun import Rerun
from megatron_ext.extras.resilience.resting_state import RestingState
from megatron_ext.extras.resilience.rewind import Rewind
from megatron_ext.extras.resilience.spikes import Spikes, limit
from megatron_ext.train.batch_size import Progress
from tests.extras.report.made_runs import checkpoint


def made_run(save: Path, **flags: Any) -> Any:
    """Return what a callback reads of a run."""
    said: list[str] = []
    return SimpleNamespace(
        config=SimpleNamespace(
            checkpoint=CheckpointConfig(save=str(save), **flags),
            fault_tolerance=FaultToleranceConfig(),
            lora=LoraConfig(),
            training=SimpleNamespace(seed=1),
            precision=SimpleNamespace(fp16=False),
        ),
        progress=Progress(iteration=5),
        said=said,
        reporters=SimpleNamespace(say=said.append),
        rewinds=[],
        chunks=[],
        optimizer=None,
        ema=None,
        context=SimpleNamespace(rank=0, is_reporting_rank=False),
    )


@pytest.mark.parametrize(
    ("load", "generation", "newest"),
    [(None, 0, None), ("save", 0, 5), ("other", 0, None), (None, 1, 5)],
)
def test_a_run_goes_back_to_its_own_checkpoints_only(
    load: str | None,
    generation: int,
    newest: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rewind_module, "on_first_rank", lambda look, what: look())
    monkeypatch.setenv("MEGATRON_EXT_GENERATION", str(generation))
    save = tmp_path / "save"
    for iteration in (5, 9):
        checkpoint(save, iteration)
    rewind = Rewind(made_run(save, load=load))
    assert rewind.newest() == newest
    checkpoint(save, 7)
    assert rewind.newest() == 7
    os.utime(save / "iter_0000009", ns=(1, 1))  # It has been written again.
    assert rewind.newest() == 9


def test_going_back_restores_the_state_and_counts_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewind_module, "on_first_rank", lambda look, what: look())
    monkeypatch.setattr(rewind_module.FrozenBase, "of_run", lambda *_: None)
    asked: list[str] = []
    loaded = Progress(iteration=6, skipped_iterations=2, average_updates=4, average_start=0.25)

    class Manager:
        def __init__(self, config: CheckpointConfig, *_: Any) -> None:
            assert (config.load, config.ckpt_step) == (config.save, 6)
            assert config.resume_mode is None
            assert not (config.finetune or config.no_load_optim or config.no_load_rng)

        def load(self, **parts: Any) -> Any:
            asked.append("loaded")
            return SimpleNamespace(progress=loaded.to_dict())

    monkeypatch.setattr(rewind_module, "CheckpointManager", Manager)
    save = tmp_path / "save"
    run = made_run(
        save, load="x", finetune=True, no_load_optim=True, no_load_rng=True, resume_mode="auto"
    )

    def end_save() -> None:
        asked.append("waited")
        checkpoint(save, 6)

    run.saves = SimpleNamespace(wait=end_save)
    run.scheduler = SimpleNamespace(num_steps=9)
    histories = SimpleNamespace(forget=lambda: asked.append("forgotten"))
    run.runner = SimpleNamespace(extra_state=None, amax_histories=histories)
    run.parameter_gather = SimpleNamespace(paused=lambda: os.scandir(tmp_path))
    run.progress = Progress(
        iteration=9, skipped_iterations=3, average_updates=8, average_start=None
    )
    assert Rewind(run).go_back() == 6
    assert asked == ["waited", "loaded", "forgotten"]
    assert run.scheduler.num_steps == 0
    # Two steps were skipped up to step 6, and all three since then are.
    progress = run.progress
    assert (progress.iteration, progress.skipped_iterations) == (9, 5)
    assert (progress.average_updates, progress.average_start) == (4, 0.25)


def test_a_limit_is_so_many_deviations_above_the_median() -> None:
    assert limit([], 8.0, 0.02) == math.inf
    assert limit([5.0, 1.0, 3.0, 2.0, 4.0], 2.0, 0.0) == pytest.approx(3 + 2 * 1.4826)
    assert limit([4.0] * 3, 8.0, 0.02) == pytest.approx(4 + 8 * 0.08)
    assert limit([-4.0] * 3, 8.0, 0.02) == pytest.approx(-4 + 8 * 0.08)


def spikes_of(tmp_path: Path, action: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """Return the callback with a window of 4, its run, and the events that it announces."""
    run = made_run(tmp_path)
    flags = FaultToleranceConfig(on_spike=action, spike_window=4, spike_factor=8.0)
    run.config.fault_tolerance = flags
    run.runner = SimpleNamespace(approvals=[], settled=True)
    events: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        spikes_module, "announce", lambda run, kind, text, **facts: events.append((kind, facts))
    )
    return Spikes(run), run, events


class Values(list[float]):
    """Stands in for values that arrive from a device."""

    def read(self) -> list[float]:
        return [*self]


def test_a_value_above_the_limit_of_half_a_window_is_a_spike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spikes, run, events = spikes_of(tmp_path, "log", monkeypatch)
    assert run.runner.approvals == []
    spikes._judge(1, 0, 4, [9.0, 9.0])
    recent = run.progress.recent_values
    spikes._judge(2, 4, 8, [100.0, 9.0])  # One value tells nothing yet.
    assert events == [] and len(recent) == 2
    recent[:] = [[1.0, 1.0]] * 2
    spikes._judge(3, 8, 12, [1.0 + 8 * 0.02, 1.0 + 8 * 0.1])  # exactly the limits
    assert events == []
    spikes._judge(4, 12, 16, [math.nan, 1.0])
    assert len(recent) == 3 and events == []
    spikes._judge(5, 16, 20, [1.0, 50.0])
    ((kind, facts),) = events
    assert (kind, facts["iteration"], facts["leaped"]) == ("spike", 5, ["grad_norm"])
    assert (facts["first_sample"], facts["last_sample"], facts["action"]) == (16, 19, "log")
    assert facts["grad_norm"] == 50.0 > facts["limits"]["grad_norm"]
    # A spike is one of the values that later steps are compared with.
    assert recent[-1] == [1.0, 50.0] and len(recent) == 4
    spikes._judge(6, 20, 24, [1.0, 1.0])
    assert len(recent) == 4 and recent[-2:] == [[1.0, 50.0], [1.0, 1.0]]


@pytest.mark.parametrize(("action", "applied"), [("log", True), ("skip", False), ("rewind", False)])
def test_a_spike_is_said_to_be_applied_only_if_it_is(
    action: str, applied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spikes, run, _ = spikes_of(tmp_path, action, monkeypatch)
    said: list[str] = []
    monkeypatch.setattr(
        spikes_module, "announce", lambda run, kind, text, **facts: said.append(text)
    )
    run.progress.recent_values[:] = [[1.0, 1.0]] * 2
    spikes._judge(5, 16, 20, [9.0, 1.0])
    (sentence,) = said
    assert sentence.startswith("iteration 5, samples 16 to 19: its loss is 9, above 1.16")
    assert sentence.endswith("; its update is not applied") is not applied


def test_each_step_is_judged_once_by_its_own_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spikes, run, _ = spikes_of(tmp_path, "skip", monkeypatch)
    judged: list[tuple[Any, ...]] = []
    monkeypatch.setattr(spikes, "_judge", lambda *given: judged.append(given))
    monkeypatch.setattr(spikes, "_shared", lambda loss, norm: Values([float(norm), float(norm)]))
    (approve,) = run.runner.approvals
    assert bool(approve({}, torch.tensor(2.0)))
    result: Any = SimpleNamespace(losses={}, update=SimpleNamespace(norm=torch.tensor(3.0)))
    spikes.after_update(result)
    assert judged[-1][3] == [2.0, 2.0]
    run.progress.consumed_train_samples = 8
    spikes.before_step()  # The next step is not asked for approval, as when its loss is infinite.
    run.progress.consumed_train_samples = 12
    spikes.after_update(result)
    assert judged[-1] == (5, 8, 12, [3.0, 3.0]) and len(judged) == 2
    run.runner.settled = False  # A GPU's values arrive during the next step.
    for iteration in (6, 7):
        run.progress.iteration = iteration
        spikes.before_step()
        spikes.after_update(result)
    assert [x[0] for x in judged[2:]] == [6]
    spikes.on_train_end()
    spikes.on_train_end()
    assert [x[0] for x in judged[2:]] == [6, 7]


def test_a_run_goes_back_once_for_each_spike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spikes, run, events = spikes_of(tmp_path, "rewind", monkeypatch)
    restored: list[int | None] = [3, None]
    spikes._rewind = SimpleNamespace(go_back=lambda: restored.pop(0))
    spikes.after_step()
    assert len(restored) == 2
    run.progress.recent_values[:] = [[1.0, 1.0]] * 2
    spikes._judge(5, 0, 4, [9.0, 1.0])
    for _ in range(2):
        spikes.after_step()
    assert run.rewinds == [(5, 3)] and len(restored) == 1
    assert [kind for kind, _ in events] == ["spike", "rewind"]
    spikes._judge(6, 4, 8, [99.0, 1.0])
    spikes.after_step()
    assert run.said == ["iteration 5: there is no checkpoint to go back to yet"]


@pytest.mark.parametrize(
    ("mine", "theirs", "agree"),
    [
        (1.0, 1.0, True),
        (1000.0, 1000.0005, True),
        (1000.0, 1000.01, False),
        (1.0, math.inf, False),
        (math.nan, 1.0, False),
        (math.nan, math.nan, False),
    ],
)
def test_replicas_agree_on_one_finite_norm(
    mine: float, theirs: float, agree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(tensor: Tensor, op: Any) -> None:
        """Join the values of another rank, which has the norm ``theirs``."""
        other = theirs if math.isfinite(theirs) else math.inf
        assert op == torch.distributed.ReduceOp.MAX
        tensor.copy_(torch.maximum(tensor, torch.tensor([other, -other], dtype=tensor.dtype)))

    monkeypatch.setattr(rerun_module.torch.distributed, "all_reduce", all_reduce)
    rerun = Rerun.__new__(Rerun)
    rerun.run = made_run(Path("x"))
    norm = torch.tensor(mine, dtype=torch.float64)
    assert bool(rerun._replicas_agree({}, norm)) is agree
    assert not rerun._overflowed()
    rerun.run.config.precision.fp16 = True
    both = not math.isfinite(mine) and not math.isfinite(theirs)
    assert rerun._overflowed() is both


def outcome(own: list[int], reduced: list[int], losses: list[int]) -> Outcome:
    return Outcome(*(torch.tensor(values) for values in (own, reduced, losses)))


def test_differences_name_parameters_before_the_loss() -> None:
    names = ["a", "b", "c"]
    one = outcome([1, 2, 3], [4, 5, 6], [7])
    assert one.differing(one, names) == ([], [])
    other = outcome([1, 0, 0], [4, 5, 0], [0])
    assert one.differing(other, names) == (["b", "c", "the loss"], ["c"])


def test_the_rank_where_a_difference_arose_is_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    rerun = Rerun.__new__(Rerun)
    rerun.run = made_run(Path("x"))
    rerun.run.device = "cpu"
    rerun._names = ["a", "b"]
    monkeypatch.setattr(rerun_module.torch.distributed, "all_reduce", lambda *_, **__: None)
    gathered: list[Any] = []
    monkeypatch.setattr(rerun, "_gathered", lambda value: gathered)
    first, second = outcome([1, 2], [3, 4], [5]), outcome([1, 2], [3, 0], [5])
    assert rerun._differing(first, first) == {}
    gathered[:] = [([], ["b"]), (["a"], ["a", "b"])]
    assert rerun._differing(first, second) == {1: ["a"]}
    gathered[:] = [([], ["b"]), ([], [])]
    assert rerun._differing(first, second) == {0: ["b"]}


def judged(
    monkeypatch: pytest.MonkeyPatch, differing: dict[int, list[str]], *, norm: float, applied: bool
) -> list[tuple[Any, ...]]:
    events: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        rerun_module, "announce",
        lambda run, kind, text, **facts: events.append((kind, facts["verdict"], facts["ranks"])),
    )  # fmt: skip
    monkeypatch.setattr(rerun_module, "places", lambda ranks, context: str(ranks))
    rerun = Rerun.__new__(Rerun)
    rerun.run = made_run(Path("x"))
    cause = "norm" if math.isfinite(norm) else "gradient"
    facts = {"cause": cause, "sentence": "x", "ranks": [2], "parameter": "p"}
    refused, again = SimpleNamespace(grad_norm=norm), SimpleNamespace(applied=applied)
    rerun._judge(differing, refused, again, facts, 7)  # type: ignore[arg-type]
    return events


def test_what_a_second_computation_shows_has_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    differs = {3: ["a"], 1: ["b"]}
    for differing, norm, applied, told in (
        (differs, math.nan, True, ("non_finite", "transient", [1, 3])),
        (differs, math.nan, False, ("non_finite", "unstable", [1, 3])),
        (differs, 9.0, True, ("mismatch", "transient", [1, 3])),
        ({}, math.nan, False, ("non_finite", "reproduced", [2])),
        ({}, math.nan, True, ("non_finite", "transient", [2])),
        ({}, 9.0, True, ("mismatch", "transient", [])),
    ):
        assert judged(monkeypatch, differing, norm=norm, applied=applied) == [told]
    # A spike, which another callback announces.
    assert judged(monkeypatch, {}, norm=9.0, applied=False) == []


def test_a_third_computation_decides_which_of_two_was_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number stands for the results of a computation; each begins in the state of the first."""
    rerun = Rerun.__new__(Rerun)
    rerun.run = made_run(Path("x"))
    rerun._names = ["a", "b"]
    asked: list[str] = []
    told: list[tuple[Any, ...]] = []
    start: Any = SimpleNamespace(restore=lambda: asked.append("restored"))
    monkeypatch.setattr(rerun, "_outcome", lambda step: step)
    monkeypatch.setattr(
        rerun, "_differing", lambda one, other: {} if one == other else {2: ["a", "b"], 1: ["b"]}
    )
    monkeypatch.setattr(rerun_module, "places", lambda ranks, context: f"ranks {ranks}")
    monkeypatch.setattr(
        rerun_module, "announce",
        lambda run, kind, text, **facts: told.append((kind, facts["verdict"], text)),
    )  # fmt: skip
    for validates, results, last, verdict in (
        (True, [5, 7], 7, None),
        (True, [5, 7], 7, "first"),
        (True, [7, 5], 5, "second"),
        (True, [7, 9], 9, "nondeterministic"),
        (False, [7], 7, "different"),
    ):
        first = 5
        computed = [first, first] if verdict is None else list(results)
        if verdict == "first":
            computed = [7, 7]
        asked.clear()
        told.clear()
        left = iter(computed)
        monkeypatch.setattr(
            rerun, "_compute", lambda inputs, left=left: asked.append("computed") or next(left)
        )
        rerun._validates = validates
        found = rerun._compare(None, first, start, 8)  # type: ignore[arg-type]
        if verdict is None:
            assert (found, told, asked) == (first, [], ["restored", "computed"])
            continue
        assert found == last
        assert asked == ["restored", "computed"] * (2 if validates else 1)
        ((kind, said, text),) = told
        assert (kind, said) == ("mismatch", verdict)
        assert "up to 2 of 2 gradients on ranks [1, 2], first `b`" in text
        assert ("so the first was wrong" in text) is (verdict == "first")
        assert ("so the second was wrong" in text) is (verdict == "second")


def test_a_step_can_be_computed_again_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[Any] = []
    for value in (1.0, 2.0):
        module = torch.nn.Module()
        module.register_buffer("statistic", torch.tensor([value]))
        chunks.append(SimpleNamespace(module=module))

    class Scaler:
        def __init__(self) -> None:
            self.state = {"scale": torch.tensor([4.0]), "count": 1}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    optimizers = [SimpleNamespace(grad_scaler=Scaler()), SimpleNamespace()]
    restored: list[Any] = []
    drained: list[bool] = []
    marks = ["marks"]
    monkeypatch.setattr(replay_module, "parts_of", lambda optimizer: optimizer)
    monkeypatch.setattr(replay_module, "random_state", lambda _: SimpleNamespace(data=["random"]))
    monkeypatch.setattr(
        replay_module, "restore_random_state", lambda context, state: restored.append(state)
    )
    monkeypatch.setattr(replay_module.core, "take_auxiliary_losses", lambda: drained.append(True))
    histories: Any = SimpleNamespace(marks=lambda: marks, set_marks=restored.append)
    start = StepStart(chunks, optimizers, histories, None)  # type: ignore[arg-type]
    scaler = optimizers[0].grad_scaler
    for _ in range(2):
        for chunk in chunks:
            chunk.module.statistic += 5
        scaler.state["scale"] *= 2
        scaler.state["count"] += 1
        start.restore()
        assert [float(chunk.module.statistic) for chunk in chunks] == [1.0, 2.0]
        assert float(scaler.state["scale"]) == 4.0 and scaler.state["count"] == 1
    assert restored == [["random"], marks] * 2 and drained == [True] * 2
    assert digests([]).shape == (0,)


class Gathered:
    """Stands in for torch.distributed; ``others`` is what another rank has found."""

    def __init__(self, others: list[str]) -> None:
        self.others = others
        self.ReduceOp = torch.distributed.ReduceOp

    def all_reduce(self, found: Tensor, op: Any) -> None:
        assert op == self.ReduceOp.MAX
        found.fill_(max(int(found), int(bool(self.others))))

    def all_gather_object(self, gathered: list[Any], own: list[str]) -> None:
        gathered[:] = [own, self.others]


def resting(monkeypatch: pytest.MonkeyPatch, interval: int) -> tuple[Any, Any, list[Tensor]]:
    """Return the callback, its run, and the tensors that rest."""
    tensors = [torch.ones(4), torch.ones(4, dtype=torch.bfloat16)]
    run = made_run(Path("x"))
    run.config.fault_tolerance = FaultToleranceConfig(check_state_interval=interval)
    run.runner = SimpleNamespace(approvals=[])
    run.context.layout = SimpleNamespace(world_size=2)
    run.parameter_gather = SimpleNamespace(paused=nullcontext)
    run.progress.iteration = 0
    named = list(zip(("weight `a`", "`exp_avg` of weight `a`"), tensors, strict=True))
    monkeypatch.setattr(resting_module, "resting_tensors", lambda _: named)
    monkeypatch.setattr(resting_module, "places", lambda ranks, context: f"ranks {ranks}")
    monkeypatch.setattr(resting_module, "announce", lambda *given, **facts: None)
    return RestingState(run), run, tensors


def test_a_resting_tensor_is_compared_in_the_steps_that_are_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others: list[str] = []
    monkeypatch.setattr(resting_module.torch, "distributed", Gathered(others))
    callback, run, tensors = resting(monkeypatch, 2)
    (approve,) = run.runner.approvals
    for iteration in range(6):
        run.progress.iteration = iteration
        callback.before_step()
        tensors[1][2] += 1  # between two updates
        if iteration % 2 == 0:
            assert bool(approve({}, torch.tensor(1.0)))
        else:
            said = f"During iteration {iteration + 1} `exp_avg` of weight `a` changed"
            with pytest.raises(MachineFault, match=said):
                approve({}, torch.tensor(1.0))
        run.progress.iteration = iteration + 1
        callback.after_step()


def test_a_bit_that_flips_after_the_step_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks name the first rank that has found one, and its tensor."""
    others: list[str] = []
    monkeypatch.setattr(resting_module.torch, "distributed", Gathered(others))
    callback, run, tensors = resting(monkeypatch, 1)
    (approve,) = run.runner.approvals
    callback.before_step()
    assert bool(approve({}, torch.tensor(1.0)))
    callback.after_step()
    tensors[0][0] = 7.0
    callback.before_step()
    with pytest.raises(MachineFault, match=r"weight `a` changed on ranks \[0\]"):
        approve({}, torch.tensor(1.0))
    callback.after_step()
    others.append("weight `b`")
    with pytest.raises(MachineFault, match=r"weight `b` changed on ranks \[1\]"):
        approve({}, torch.tensor(1.0))


def test_moments_of_any_float_type_rest() -> None:
    main = torch.ones(2)
    state = {
        "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2, dtype=torch.bfloat16),
        "step": torch.tensor(3), "other": 4,
    }  # fmt: skip
    part = SimpleNamespace(optimizer=SimpleNamespace(state={main: state}))
    names = [name for name, _ in resting_module._kept(part, main)]
    assert names == ["the optimizer's copy", "`exp_avg`", "`exp_avg_sq`"]
