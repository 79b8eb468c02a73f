"""Which state a run resumes from: its checkpoints, its snapshots, or none."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.checkpoint import resume
from megatron_ext.checkpoint.resume import Resume
from megatron_ext.checkpoint.stored import CheckpointRef
from megatron_ext.config.fault_tolerance import FaultToleranceConfig
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.grid import Layout

HERE = Layout(2)


class Recovery:
    """Snapshots of one step, whose calls a test can read."""

    def __init__(self, name: str, step: int, *, stays: bool = False, left: bool = False) -> None:
        self.name, self.step = name, step
        self.memory = SimpleNamespace(stays=stays, left=left, is_behind=False)
        self.layout = HERE
        self.calls = list[Any]()

    def newest(self, newer_than: int, *, with_earlier: bool = False) -> Any:
        self.calls.append((newer_than, with_earlier))
        found = (SimpleNamespace(iteration=self.step, layout=self.layout), self.name)
        return found if self.step > newer_than else None

    def source(self, chosen: Any) -> str:
        return str(chosen[1])

    def state_of(self, chosen: Any) -> Any:
        return {"values": chosen[1]}, {"iteration": self.step}, {}, Path("snapshots")

    def publish(self, chosen: Any, save: str | None) -> CheckpointRef:
        self.calls.append(("publish", save))
        return CheckpointRef(Path("temporary"), self.step, weights_only=False)

    def remove_temporary(self, checkpoint: CheckpointRef) -> None:
        self.calls.append(("remove", checkpoint.iteration))


class Manager:
    """Notes what is loaded."""

    def __init__(self) -> None:
        self.loads = list[dict[str, Any]]()

    def load(self, **how: Any) -> Any:
        self.loads.append(how)
        iteration = 0 if how["checkpoint"].weights_only else how["checkpoint"].iteration
        return SimpleNamespace(iteration=iteration)

    def restore(self, values: Any, **_: Any) -> list[str]:
        self.loads.append(values)
        return ["a queue starts anew"]


class Scene:
    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        found: int | None = None,
        *,
        weights_only: bool = False,
        generation: int = 0,
        elastic: bool = False,
        damaged: tuple[int, ...] = (),
        **flags: Any,
    ) -> None:
        self.root = Path("run")
        self.steps = [] if found is None else [found]
        self.weights_only = weights_only

        def verify(checkpoint: CheckpointRef, _: Any) -> None:
            if checkpoint.iteration in damaged:
                raise CheckpointError("a shard is damaged.")

        def find(_: Any, broken: Any = None) -> CheckpointRef | None:
            whole = [CheckpointRef(self.root, step, weights_only) for step in self.steps]
            return next((x for x in whole if x.path not in (broken or {})), None)

        events = self.events = list[dict[str, Any]]()
        for name, value in {
            "largest_of_all_ranks": lambda own: [max(*own, 0)],
            "on_first_rank": lambda work, _: work(),
            "generation": lambda: generation,
            "find": find,
            "check_changes": lambda *_, **__: ["a note"],
            "append_event": lambda _save, _kind, **what: events.append(what),
        }.items():
            monkeypatch.setattr(resume, name, value)
        monkeypatch.setattr(resume.storage, "verify", verify)
        self.manager: Any = Manager()
        self.fault_tolerance = FaultToleranceConfig(**({"elastic_min_nodes": 1} if elastic else {}))
        config = RunConfig(
            checkpoint=CheckpointConfig(**{"load": "run", **flags}),
            fault_tolerance=self.fault_tolerance,
        )
        context: Any = SimpleNamespace(layout=HERE, rank=0)
        self.resume = Resume(self.manager, config, context)

    def load(self, *recoveries: Any) -> str:
        _, source = self.resume.load(recoveries, model="model")
        return source


def test_a_run_without_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.load() == "start" and scene.resume.saved_at == 0
    scene = Scene(monkeypatch, 4)
    assert scene.load() == "checkpoint" and scene.resume.saved_at == 4
    # A restart takes what the flags say of a checkpoint that another run has written.
    again = Scene(monkeypatch, 4, generation=1)
    assert again.load() == "checkpoint"
    for each in (scene, again):
        assert [load["whole"] for load in each.manager.loads] == [False]


@pytest.mark.parametrize(("step", "source"), [(3, "checkpoint"), (4, "memory"), (5, "memory")])
def test_snapshots_of_the_same_step_come_before_a_checkpoint(
    step: int, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(monkeypatch, 4, generation=1)
    recovery = Recovery("memory", step)
    assert scene.load(recovery) == source
    assert recovery.calls == [(3, False)] and scene.resume.saved_at == 4


def test_the_newest_of_several_stores_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 4, generation=1)
    first, second, third = Recovery("a", 6), Recovery("b", 5), Recovery("c", 8)
    assert scene.load(first, second) == "a"
    assert second.calls == [(6, False)]
    assert scene.load(first, third, second) == "c"


def test_weights_of_another_run_are_older_than_any_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, 400, weights_only=True, generation=1)
    recovery = Recovery("memory", 0)
    assert scene.load(recovery) == "memory"
    assert recovery.calls == [(-1, False)] and scene.resume.saved_at == 0
    scene = Scene(monkeypatch, 400, weights_only=True, generation=1)
    assert scene.load() == "checkpoint" and scene.resume.saved_at == 0


@pytest.mark.parametrize(
    ("store", "flags", "looks"),
    [
        ({}, {}, False),
        ({"stays": True}, {}, True),
        ({"left": True}, {}, True),
        ({"stays": True}, {"finetune": True}, False),
        ({"stays": True}, {"ckpt_step": 4}, False),
        ({"stays": True}, {"load": None, "save": "run"}, False),
        ({"stays": True}, {"load": None, "save": "run", "resume_mode": "auto"}, True),
    ],
)
def test_a_first_start_takes_snapshots_that_stay_or_were_left(
    store: dict[str, bool], flags: dict[str, Any], looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(monkeypatch, 4, **flags)
    recovery = Recovery("memory", 6, **store)
    assert scene.load(recovery) == ("memory" if looks else "checkpoint")
    assert recovery.calls == ([(3, True)] if looks else [])


@pytest.mark.parametrize(
    ("flags", "with_earlier"),
    [({}, True), ({"finetune": True}, False), ({"ckpt_step": 4}, False)],
)
def test_a_restart_takes_snapshots_of_earlier_runs_only_if_it_would_have_done_so_at_first(
    flags: dict[str, Any], with_earlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(monkeypatch, 4, generation=1, **flags)
    recovery: Any = Recovery("memory", 6, stays=True)
    loaded, source = scene.resume.load([recovery], model="model")
    assert source == "memory" and recovery.calls == [(3, with_earlier)]
    assert scene.manager.loads == [{"values": "memory"}]
    assert loaded is not None and loaded.notes == ["a note", "a queue starts anew"]


def test_snapshots_of_another_layout_are_loaded_whole_through_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, 4, generation=1, save="save")
    monkeypatch.setattr(scene.resume, "_newest_of_this_run", lambda: None)
    recovery = Recovery("memory", 6)
    recovery.layout = Layout(4)
    assert scene.load(recovery) == "memory"
    assert recovery.calls[1:] == [("publish", "save"), ("remove", 6)]
    assert recovery.memory.is_behind
    (load,) = scene.manager.loads
    assert load["checkpoint"].root == Path("temporary") and load["whole"]


def test_what_is_damaged_is_told_once_and_the_next_older_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(monkeypatch, 6, generation=1, damaged=(6, 4))
    scene.steps += [4, 2]
    assert scene.load() == "checkpoint" and scene.resume.saved_at == 2
    assert [(event["iteration"], event["cause"]) for event in scene.events] == [
        (6, "a shard is damaged"),
        (4, "a shard is damaged"),
    ]
    assert {event["generation"] for event in scene.events} == {1}
    shown = capfd.readouterr().out
    assert shown.count("is passed over: a shard is damaged") == 2
    with pytest.raises(CheckpointError, match="a shard is damaged"):
        Scene(monkeypatch, 6, damaged=(6,)).load()


@pytest.mark.parametrize("name", ["iter_0000012", "iter_0000012.replaced"])
def test_the_event_of_a_damaged_checkpoint_names_its_iteration(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(monkeypatch)
    scene.resume._damaged = {Path(name): "why"}
    scene.resume._tell([Path(name)])
    assert scene.events[0]["iteration"] == 12


def test_a_machine_that_joined_later_knows_of_the_restarts_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, 4)
    monkeypatch.setattr(resume, "largest_of_all_ranks", lambda own: [max(*own, 2)])
    config = dataclasses.replace(scene.resume._run_config)
    joined = Resume(scene.manager, config, scene.resume._context)
    assert joined._generation == 2
    recovery: Any = Recovery("memory", 6)
    assert joined.load([recovery])[1] == "memory"


def test_a_run_that_may_be_restarted_passes_over_a_damaged_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FaultToleranceConfig, "may_be_restarted", True)
    scene = Scene(monkeypatch, 6, damaged=(6,))
    scene.steps.append(4)
    assert scene.load() == "checkpoint" and scene.resume.saved_at == 4


def test_a_restart_prefers_what_this_run_has_written_itself(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Even if it began from a checkpoint of later steps, and if its own newest one is damaged."""
    asked = list[bool]()

    def own(_: Path, *, again: bool) -> list[int]:
        asked.append(again)
        return [8, 6, 4] if again else []

    monkeypatch.setattr(resume, "own_checkpoints", own)
    monkeypatch.setattr(
        resume, "fault_of", lambda path: "a file is missing" if path.name[-1] == "8" else None
    )
    scene = Scene(monkeypatch, 400, generation=1, save="save", damaged=(6,))
    assert scene.load() == "checkpoint" and scene.resume.saved_at == 4
    (load,) = scene.manager.loads
    assert load["checkpoint"] == CheckpointRef(Path("save"), 4, weights_only=False)
    assert load["whole"]
    assert [event["iteration"] for event in scene.events] == [8, 6]
    assert asked == [True, True]
    scene = Scene(monkeypatch, 400, save="save")
    assert scene.load() == "checkpoint" and scene.resume.saved_at == 400
