"""Runs that go wrong, or begin from another's weights."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.video.streaming.runs import attempt, run, runner_of, weights


def _fail(run: Run, where: str) -> None:
    """Let one rank of two fail in the second step, in the pass of a network."""
    runner = runner_of(run)
    if run.context.rank != 1:
        return
    if where == "prompts":
        encoder = runner.sequence.prompts._encoder  # type: ignore[attr-defined]
        encode = encoder.encode
        asked = list[str]()

        def encode_once(captions: list[str]) -> Any:
            asked.extend(captions)
            if len(asked) > 2:
                raise RuntimeError("out of memory")
            return encode(captions)

        encoder.encode = encode_once
        return
    inner = runner._pass

    def failing(kind: str, accumulation: int) -> Any:
        if runner.extra_state.steps == 1 and kind == where:
            raise RuntimeError("out of memory")
        return inner(kind, accumulation)  # type: ignore[arg-type]

    runner._pass = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("where", ["critic", "prompts"])
def test_an_exception_on_one_rank_ends_the_run(
    tmp_path: Path, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check that the exit code is not 0 and that no rank hangs."""
    started = time.monotonic()
    fail = partial(_fail, where=where)
    code, rows = attempt(tmp_path, "--train-iters 9", ranks=2, batch=2, prepare=fail)
    assert code == (1 if where == "critic" else 2)
    assert time.monotonic() - started < 40
    assert len(rows) < 9
    printed = capfd.readouterr().err
    assert "out of memory" in printed
    if where == "prompts":
        # The other rank ends too, and knows why.
        assert "[rank 0] Encoding the prompts failed (RuntimeError('out of memory'))" in printed
        assert "see the traceback of rank 1." in printed


def _record_start(run: Run, path: Path) -> None:
    runner = runner_of(run)
    content = {
        "iteration": run.progress.iteration,
        "steps": runner.extra_state.steps,
        "sequence": runner.sequence.state,
        "generator": weights(runner.generator.network),
        "critic": weights(runner.critic.network),
    }
    torch.save(content, path)


def test_the_steps_of_a_base_checkpoint_are_not_taken_over(tmp_path: Path) -> None:
    run(tmp_path, "--train-iters 3", save="base")
    words = f"--train-iters 2 --pretrained-checkpoint {tmp_path / 'base'} --seed 8"
    words += f" --critic-checkpoint {tmp_path / 'base'}"
    path = tmp_path / "start.pt"
    rows = run(tmp_path, words, start=200, prepare=partial(_record_start, path=path))
    assert [row["iteration"] for row in rows] == [1, 2]
    # Step 1 is one of the generator, as in any run; the average has not begun.
    assert "generator loss" in rows[0]
    found = torch.load(path, weights_only=False)
    assert (found["iteration"], found["steps"], found["sequence"]) == (0, 0, None)
    base = whole_tensors(tmp_path / "base" / "iter_0000003", tmp_path / "base.pt")
    # A network starts from what it was in the run that the checkpoint is of.
    for role, prefix in (("generator", ""), ("critic", "critic.")):
        for name, tensor in found[role].items():
            assert torch.equal(tensor, base[f"{prefix}{name}"]), (role, name)


def test_weights_of_critic_and_teacher_do_not_come_from_the_run_itself(tmp_path: Path) -> None:
    """Resume a run, which finds its own folder before any other."""
    run(tmp_path, "--train-iters 1 --seed 8", save="other")
    words = f"--train-iters 2 --resume-mode auto --teacher-checkpoint {tmp_path / 'other'}"
    assert len(run(tmp_path, f"{words} --exit-interval 1")) == 1
    path = tmp_path / "teacher.pt"

    def record(run: Run) -> None:
        torch.save(weights(runner_of(run).teacher), path)

    rows = run(tmp_path, words, prepare=record)
    assert [row["iteration"] for row in rows] == [1, 2]
    other = whole_tensors(tmp_path / "other" / "iter_0000001", tmp_path / "other.pt")
    for name, tensor in torch.load(path).items():
        assert torch.equal(tensor, other[name]), name


def test_a_run_of_another_kind_is_not_gone_on_with(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def hide_critic(run: Run) -> None:
        """Save without what a streaming run adds."""
        save = run.checkpoints.save
        run.checkpoints.save = lambda *args, **parts: save(  # type: ignore[method-assign]
            *args, **{**parts, "extra_state": None}
        )

    run(tmp_path, "--train-iters 1", save="plain", prepare=hide_critic)
    code, _ = attempt(tmp_path, f"--train-iters 2 --load {tmp_path / 'plain'}")
    assert code == 2
    assert "holds no critic, so it is not of a run with `--task streaming`; give it as " in (
        capfd.readouterr().err
    )
