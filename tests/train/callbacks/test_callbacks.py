"""A user's callback sees every moment of a run on every rank, and may save or end it."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.files import published
from megatron_ext.text.task import GPT
from megatron_ext.train.batch_size import Progress
from megatron_ext.train.callbacks import optional
from megatron_ext.train.callbacks.callback import (
    Callback,
    Decision,
    Losses,
    StopConditions,
    due,
)
from megatron_ext.train.callbacks.invariants import (
    InvariantError,
    Invariants,
    _digest,
    check_replicas,
    check_zeroed,
)
from megatron_ext.train.callbacks.optional import (
    GarbageCollection,
    SaveWatch,
    StepProfiler,
    WeightAverage,
)
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from tests.training_runs import TINY, mock_data, train, train_on_ranks, training_rows, without

FLAGS = [
    *without(TINY, "--eval-iters", "--eval-interval", "--split", "--num-layers"),
    *mock_data(),
    *"--num-layers 2 --split 90,10,0 --eval-iters 1 --eval-interval 2 --train-iters 5".split(),
]


class Diary(Callback):
    """Writes down each moment, and ends the run after the third step."""

    def note(self, moment: str) -> None:
        folder = Path(self.run.config.checkpoint.save or "")
        with (folder / f"diary_{self.run.context.rank}").open("a") as diary:
            diary.write(f"{moment} {self.run.progress.iteration}\n")

    def on_train_start(self) -> None:
        self.note("start")

    def before_step(self) -> None:
        self.note("before step")

    def after_update(self, result: StepResult) -> None:
        self.note(f"updated {result.update.applied}")

    def before_evaluation(self) -> None:
        self.note("before evaluation")

    def after_evaluation(self, losses: Losses) -> None:
        self.note(f"evaluated {len(losses)}")

    def after_step(self) -> None:
        self.note("after step")

    def decide(self, decision: Decision) -> None:
        decision.save |= self.run.progress.iteration == 1
        if self.run.progress.iteration == 3:
            decision.stop, decision.exit_code = "the diary is full", 5

    def on_train_end(self) -> None:
        self.note("end")


def test_a_callback_of_a_task_decides(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = dataclasses.replace(GPT, callbacks=(Diary,))
    code, rows = train_on_ranks(FLAGS, ranks=2, save=tmp_path, task=task)
    assert (code, len(training_rows(rows))) == (5, 3)
    assert published(tmp_path) == [1, 3]
    assert "> exiting at iteration 3 (the diary is full)" in capfd.readouterr().out
    moments = ["start 0"]
    for step in (1, 2, 3):
        moments += [f"before step {step - 1}", f"updated True {step}"]
        moments += ["before evaluation 2", "evaluated 1 2"] if step == 2 else []
        moments.append(f"after step {step}")
    for rank in (0, 1):
        diary = (tmp_path / f"diary_{rank}").read_text().splitlines()
        assert diary == [*moments, "end 3"]


@pytest.mark.parametrize(
    ("iteration", "interval", "expected"),
    [(4, 2, True), (3, 2, False), (0, 2, True), (4, None, False), (4, 0, False), (4, -2, False)],
)
def test_when_an_interval_is_due(iteration: int, interval: int | None, expected: bool) -> None:
    assert due(iteration, interval) is expected


def run_at(iteration: int, **settings: Any) -> Any:
    """Return a run with these settings, which may belong to any section of its flags."""
    names = "save save_interval exit_interval manual_gc_interval manual_gc_eval".split()
    section = SimpleNamespace(**{**dict.fromkeys(names), **settings})
    config = SimpleNamespace(checkpoint=section, training=section, logging=section, ema=section)
    context = SimpleNamespace(rank=3)
    return SimpleNamespace(
        config=config, progress=Progress(iteration=iteration), device=None, context=context
    )


@pytest.mark.parametrize(
    ("request_", "save", "stop", "code"),
    [
        ("signal", "out", "signal", 143),
        ("signal", None, "signal", 125),
        ("resize", "out", "resize", 121),
        ("duration", "out", "duration", 0),
        (None, "out", "exit interval", 0),
    ],
)
def test_requests_to_stop_come_before_the_interval(
    request_: str | None, save: str | None, stop: str, code: int
) -> None:
    run = run_at(6, save=save, save_interval=4, exit_interval=3)
    run.stop_requests = SimpleNamespace(check=lambda device: request_, watches=False)
    assert StopConditions.apply(run)
    decision = Decision()
    StopConditions(run).decide(decision)
    assert (decision.stop, decision.exit_code, decision.save) == (stop, code, False)
    run.progress.iteration = 8
    StopConditions(run).decide(decision)
    assert decision.save
    # What others have decided stays.
    if request_ is None:
        other = Decision(stop="the diary is full", save=True)
        run.progress.iteration = 9
        StopConditions(run).decide(other)
        assert (other.stop, other.save) == ("the diary is full", True)


def test_a_failed_save_is_repeated_and_a_save_that_is_due_stays_due() -> None:
    run = run_at(6)
    looks: list[str] = []
    for repeats, due_already, saved in (
        (False, False, False), (True, False, True), (False, True, True), (True, True, True),
    ):  # fmt: skip
        saves: Any = SimpleNamespace(
            must_repeat=lambda repeats=repeats: repeats, look=lambda: looks.append("look")
        )
        decision = Decision(save=due_already)
        watch = SaveWatch(run, saves)
        watch.after_step()
        watch.decide(decision)
        assert decision.save is saved
    assert len(looks) == 4


def test_a_time_limit_alone_needs_stop_conditions() -> None:
    run = run_at(0)
    for watches in (False, True):
        run.stop_requests = SimpleNamespace(watches=watches)
        assert StopConditions.apply(run) is watches


def test_garbage_is_collected_at_the_interval_and_around_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Any] = []
    fake = SimpleNamespace(
        disable=lambda: events.append("off"),
        collect=lambda generation=2: events.append(generation),
    )
    monkeypatch.setattr(optional, "gc", fake)
    for around in (True, False):
        run = run_at(0, manual_gc_interval=2, manual_gc_eval=around)
        collector = GarbageCollection(run)
        collector.on_train_start()
        assert events == ["off", 2]
        for run.progress.iteration in (1, 2, 3):
            events.append(f"step {run.progress.iteration}")
            collector.after_step()
        assert events[2:] == ["step 1", "step 2", 2, "step 3"]
        events.clear()
        collector.before_evaluation()
        collector.after_evaluation([])
        assert events == [2, 0] * around
        events.clear()


@pytest.mark.parametrize(
    ("board", "save", "folder"), [("b", "s", "b"), (None, "s", "s"), (None, None, ".")]
)
def test_the_steps_that_are_profiled(
    board: str | None,
    save: str | None,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    steps: list[int] = []
    run = run_at(0, save=save, tensorboard_dir=board, profile_step_start=2, profile_step_end=4)

    class Profile:
        def __init__(self, **_: Any) -> None:
            pass

        def start(self) -> None:
            steps.append(run.progress.iteration)

        stop = start

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text("trace")

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    profiler = StepProfiler(run)
    for done in range(6):
        run.progress.iteration = done
        profiler.before_step()
        run.progress.iteration = done + 1
        profiler.after_update(None)  # type: ignore[arg-type]
    profiler.on_train_end()
    # Iterations are counted from 0 here: the steps 2 and 3.
    assert steps == [2, 4]
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.json")] == [
        Path(folder) / "profile_rank3.json"
    ]


def test_averages_begin_exactly_at_their_start_and_count_the_steps_of_the_model() -> None:
    """Every other step of this run trains its model, and every second of those is averaged."""
    run = run_at(0, ema_update_every=2)
    updates: list[tuple[int, int]] = []
    run.ema = SimpleNamespace(
        start=6,
        decay_after=lambda earlier: 0.5,
        update=lambda step, earlier: updates.append((step, earlier)),
    )
    run.runner = SimpleNamespace(model_steps=lambda steps: steps // 2)
    update = SimpleNamespace(is_read=True, applied=True)
    average = WeightAverage(run)
    for run.progress.iteration in range(1, 13):
        trained = update if run.progress.iteration % 2 == 0 else None
        average.after_update(SimpleNamespace(model_update=trained))  # type: ignore[arg-type]
    assert updates == [(2, 0), (4, 0), (8, 0), (12, 1)]
    assert run.progress.average_start == 0.25
    update.applied = False
    run.progress.iteration = 16
    average.after_update(SimpleNamespace(model_update=update))  # type: ignore[arg-type]
    # A skipped step counts, but changes no average.
    assert (len(updates), run.progress.average_updates) == (4, 3)


def test_gradients_are_checked_before_the_steps_at_the_interval_alone() -> None:
    run = run_at(0, check_invariants=3)
    run.runner = SimpleNamespace(check_zeroed=None)
    checks = Invariants(run)
    checked: list[int] = []
    for run.progress.iteration in range(7):
        checks.before_step()
        if run.runner.check_zeroed is not None:
            checked.append(run.runner.check_zeroed.keywords["iteration"])
    assert checked == [3, 6]


def test_a_digest_tells_orders_of_bytes_apart() -> None:
    some = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert _digest(some).tolist() == [6, 1 + 4 + 9]
    assert _digest(some.flip(0)).tolist() == [6, 3 + 4 + 3]


def test_a_gradient_outside_of_the_buffer_is_left_over_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    chunk: Any = torch.nn.Linear(2, 2, bias=False)
    check_zeroed([chunk], 1)
    chunk.weight.grad = torch.zeros(2, 2)
    with pytest.raises(InvariantError, match=r"Before iteration 2 .*weight` on rank 5 is not"):
        check_zeroed([chunk], 2)


MOCK = " ".join([*TINY, *mock_data()])
Change = Callable[[Run], None]
TIED = "--no-untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"


def spoil(run: Run, name: str, rank: int) -> None:
    if run.context.rank == rank:
        parameters = dict(run.chunks[0].named_parameters())
        key = next(key for key in parameters if name in key)
        with torch.no_grad():
            parameters[key].view(-1)[3] += 1e-3


def spoil_history(run: Run, name: str, rank: int) -> None:
    if run.context.rank == rank:
        modules = run.chunks[0].named_modules()
        scaling: Any = next(module for key, module in modules if key.endswith(f"{name}.fp8"))
        scaling.amax_history[0, 1] = 3.0


def message_of(words: str, ranks: int, change: Change, folder: Path) -> str:
    """Return the message of the check on some rank, after ``change`` has been made."""

    def prepare(run: Run) -> None:
        check_replicas(run.chunks, run.context, 0)
        change(run)
        try:
            check_replicas(run.chunks, run.context, 7)
        except InvariantError as error:
            (folder / f"{run.context.rank}").write_text(str(error))

    train(f"{MOCK} --train-iters 1 {words}", folder / "save", ranks, prepare=prepare)
    texts = {path.read_text() for path in folder.iterdir() if path.is_file()}
    return "\n".join(sorted(texts))


@pytest.mark.parametrize(
    ("words", "ranks", "name", "rank", "pattern"),
    [
        ("", 4, "linear_proj.weight", 2, r"linear_proj.weight` differs between data-parallel "
         r"replicas: ranks \[2\] do not hold what rank 0 holds"),
        ("--context-parallel-size 2", 2, "final_layernorm", 1, r"final_layernorm.weight` differs "
         r"between data-parallel replicas: ranks \[1\] do not hold what rank 0"),
        ("--tensor-model-parallel-size 2", 2, "final_layernorm", 1, r"final_layernorm.weight` "
         r"differs between tensor-parallel ranks: ranks \[1\]"),
        (f"--pipeline-model-parallel-size 2 {TIED}", 2, "output_layer", 1, r"the tied embedding` "
         r"differs between pipeline stages: ranks \[1\] do not hold what rank 0"),
        (f"--expert-model-parallel-size 2 {EXPERTS}", 4, "local_experts.1.linear_fc1", 3,
         r"experts.1.linear_fc1.weight` differs between replicas of the experts: ranks \[3\] do "
         r"not hold what rank 1 holds"),
        (f"--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
         f"{EXPERTS}", 2, "local_experts.1.linear_fc1", 1, r"experts.1.linear_fc1.weight` differs "
         r"between replicas of the experts: ranks \[1\] do not hold what rank 0 holds"),
    ],
)  # fmt: skip
def test_a_violation_names_the_parameter_and_the_ranks(
    words: str, ranks: int, name: str, rank: int, pattern: str, tmp_path: Path
) -> None:
    text = message_of(words, ranks, partial(spoil, name=name, rank=rank), tmp_path)
    assert re.search(r"After iteration 7 the parameter `.*" + pattern, text), text


FP8 = "--bf16 --ffn-hidden-size 192 --fp8-format hybrid"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--tensor-model-parallel-size 2", "linear_proj"),
        (EXPERTS, "experts.local_experts.2.linear_fc1"),
    ],
)
def test_histories_of_8_bit_scales_are_compared(words: str, name: str, tmp_path: Path) -> None:
    change = partial(spoil_history, name=name, rank=1)
    text = message_of(f"{FP8} {words}", 2, change, tmp_path)
    pattern = (
        rf"the history `.*{name}.fp8.amax_history` differs between ranks with parts of its layer: "
        r"ranks \[1\] do not hold what rank 0 holds; the largest magnitudes"
    )
    assert re.search(pattern, text), text


def test_tensor_parallel_parts_may_differ(tmp_path: Path) -> None:
    change = partial(spoil, name="linear_proj.weight", rank=1)
    assert message_of("--tensor-model-parallel-size 2", 2, change, tmp_path) == ""


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", 4),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 4),
        (f"--expert-model-parallel-size 2 {EXPERTS}", 4),
        ("--overlap-grad-reduce --overlap-param-gather", 2),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v", 4),
        ("--tensor-model-parallel-size 2 --hidden-dropout 0.3", 2),
        (f"{FP8} --expert-model-parallel-size 2 {EXPERTS}", 2),
    ],
)
def test_training_keeps_the_invariants(words: str, ranks: int, tmp_path: Path) -> None:
    train(f"{MOCK} --train-iters 4 --check-invariants 2 {words}", tmp_path, ranks)


def test_a_stale_gradient_is_found(tmp_path: Path) -> None:
    def prepare(run: Run) -> None:
        (chunk,) = run.chunks
        check_zeroed([chunk], 4)
        parameter = dict(chunk.named_parameters())["module.decoder.final_layernorm.weight"]
        parameter.main_grad[2] = 1.0  # type: ignore[attr-defined]
        with pytest.raises(
            InvariantError,
            match=r"Before iteration 5 the gradient of `module.decoder.final_layernorm.weight` on "
            "rank 0 is not zero",
        ):
            check_zeroed([chunk], 5)

    train(f"{MOCK} --train-iters 1", tmp_path, prepare=prepare)
