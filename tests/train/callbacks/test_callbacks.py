"""A user's callback sees every moment of a run on every rank, and may save or end it."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.files import published
from megatron_ext.text.task import GPT
from megatron_ext.train.callbacks.callback import Callback, Decision, Losses
from megatron_ext.train.callbacks.invariants import InvariantError, check_replicas, check_zeroed
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
