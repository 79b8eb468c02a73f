"""The changes, constants and counts of the steps of a streaming run."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext.optim.update import global_grad_norm, parts_of
from megatron_ext.train.run import Run
from tests.video.streaming.runs import (
    CLIPS,
    Rows,
    after_each_step,
    differ,
    on_each_clip,
    run,
    runner_of,
    weights,
)

STEPS, INTERVAL = 10, 5
TRAINED = [step % INTERVAL == 0 for step in range(STEPS)]


def _record(run: Run, path: Path) -> None:
    """Write down the weights of all networks before and after each step, and the clips."""
    runner = runner_of(run)
    networks = {
        "generator": runner.generator.network,
        "critic": runner.critic.network,
        "teacher": runner.teacher,
    }
    trained = (runner.generator, runner.critic)
    seen = [{name: weights(x) for name, x in networks.items()}]
    clips: list[tuple[int, int, str]] = []
    memo: list[bool] = []
    content: dict[str, Any] = {
        "weights": seen,
        "chunks": clips,
        "memo": memo,
        "clips": [network.clip_grad for network in trained],
        "betas": [
            group["betas"]
            for network in trained
            for part in parts_of(network.optimizer)
            for group in part.optimizer.param_groups
        ],
        "optimized": sum(
            p.numel()
            for network in trained
            for part in parts_of(network.optimizer)
            for p in part.get_parameters()
        ),
        "buffers": [hasattr(p, "main_grad") for p in runner.teacher.parameters()],
        "teacher": [(p.requires_grad, p.grad) for p in runner.teacher.parameters()],
    }

    def record(_: Any) -> None:
        seen.append({name: weights(x) for name, x in networks.items()})
        memo.append(runner.sequence.generator.cache.memo.is_filled)
        torch.save(content, path)

    after_each_step(run, record)
    on_each_clip(
        run, lambda clip, trains: clips.append((clip.sequence, clip.number, "gc"[not trains]))
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rows, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("step")
    rows = run(
        folder,
        f"--train-iters {STEPS}",
        interval=INTERVAL,
        prepare=partial(_record, path=folder / "seen.pt"),
    )
    return rows, torch.load(folder / "seen.pt", weights_only=False)


def test_the_generator_is_trained_in_one_of_so_many_steps(
    recorded: tuple[Rows, dict[str, Any]],
) -> None:
    rows, seen = recorded
    pairs = list(zip(seen["weights"], seen["weights"][1:], strict=False))
    assert [differ(a["generator"], b["generator"]) for a, b in pairs] == TRAINED
    assert all(differ(a["critic"], b["critic"]) for a, b in pairs)
    assert set(seen["betas"]) == {(0.0, 0.999)} and seen["clips"] == [10.0, 10.0]
    # The first step is reported once more in the second line, as in all runs.
    logged = ["generator loss" in row for row in rows]
    assert logged[:1] + logged[2:] == TRAINED[:1] + TRAINED[2:]
    for row, trains in zip(rows[2:], TRAINED[2:], strict=True):
        assert ("dmdtrain_gradient_norm" in row) == ("generator grad norm" in row) == trains
        assert (
            row["train/loss"] == row["critic loss"] and row["grad_norm"] == row["critic grad norm"]
        )
        assert math.isfinite(row["critic loss"]) and row["critic loss"] > 0 and row["grad_norm"] > 0
        assert row["seconds_per_iteration"] > 0


def test_both_passes_advance_one_sequence(recorded: tuple[Rows, dict[str, Any]]) -> None:
    kinds = "".join("gc" if trains else "c" for trains in TRAINED)
    wanted = [(i // CLIPS, i % CLIPS, kind) for i, kind in enumerate(kinds)]
    assert recorded[1]["chunks"] == wanted


def test_what_the_text_gave_is_forgotten_when_the_weights_move(
    recorded: tuple[Rows, dict[str, Any]],
) -> None:
    """Keep the keys of past frames, which belong to what was generated."""
    assert recorded[1]["memo"] == [not trains for trains in TRAINED]


def test_the_teacher_never_changes(recorded: tuple[Rows, dict[str, Any]]) -> None:
    seen = recorded[1]
    first, last = seen["weights"][0], seen["weights"][-1]
    assert not differ(first["teacher"], last["teacher"])
    assert not any(seen["buffers"])
    assert seen["teacher"] == [(False, None)] * len(first["teacher"])
    # It starts apart from critic and generator, and in no optimizer.
    assert differ(first["teacher"], first["critic"])
    trained = [p.numel() for name in ("generator", "critic") for p in first[name].values()]
    assert seen["optimized"] == sum(trained)


def _record_applied_norms(run: Run, path: Path) -> None:
    """Write down the norms of the gradients that the optimizers apply."""
    runner, applied = runner_of(run), dict[str, float]()
    for name, network in (("generator", runner.generator), ("critic", runner.critic)):
        optimizer = network.optimizer
        step = optimizer.step_with_ready_grads

        def noted(name: str = name, optimizer: Any = optimizer, step: Any = step) -> Any:
            applied[name] = global_grad_norm(optimizer)
            torch.save(applied, path)
            return step()

        optimizer.step_with_ready_grads = noted  # type: ignore[method-assign]


def test_each_network_is_clipped_by_itself(
    tmp_path: Path, recorded: tuple[Rows, dict[str, Any]]
) -> None:
    words = "--train-iters 1 --clip-grad 0.002 --critic-clip-grad 0.003"
    record = partial(_record_applied_norms, path=tmp_path / "norms.pt")
    (row,) = run(tmp_path, words, interval=INTERVAL, prepare=record)
    applied = torch.load(tmp_path / "norms.pt")
    assert math.isclose(applied["generator"], 0.002, rel_tol=1e-3)
    assert math.isclose(applied["critic"], 0.003, rel_tol=1e-3)
    # Logged is what the gradients were before, as in the run that clips at 10.
    for name in ("generator grad norm", "critic grad norm"):
        assert row[name] == recorded[0][0][name] > 0.003


def test_a_refused_update_of_one_network_leaves_the_other(tmp_path: Path) -> None:
    """Put a NaN into the critic's gradients: the generator and its average still move."""

    def spoil(run: Run) -> None:
        runner, assert_ema = runner_of(run), run.ema
        assert assert_ema is not None
        reduce = type(runner.critic).reduce

        def spoiled(self: Any, *args: Any, **options: Any) -> None:
            reduce(self, *args, **options)
            if self is runner.critic:
                next(iter(self.network.parameters())).main_grad.fill_(math.nan)

        type(runner.critic).reduce = spoiled  # type: ignore[method-assign]
        before = [weights(x.network) for x in (runner.generator, runner.critic)]
        update = assert_ema.update
        moved = list[int]()

        def noted(step: int) -> None:
            moved.append(step)
            update(step)

        assert_ema.update = noted  # type: ignore[method-assign]

        def check(_: Any) -> None:
            after = [weights(x.network) for x in (runner.generator, runner.critic)]
            changed = [differ(a, b) for a, b in zip(before, after, strict=True)]
            torch.save({"changed": changed, "moved": moved}, tmp_path / "seen.pt")

        after_each_step(run, check)

    rows = run(tmp_path, "--train-iters 2", interval=INTERVAL, prepare=spoil)
    seen = torch.load(tmp_path / "seen.pt")
    assert seen == {"changed": [True, False], "moved": [1]}
    assert [row["skipped_iterations"] for row in rows] == [1, 2]


def _record_operations(run: Run, path: Path) -> None:
    """Write down what torch counts of each step, and what the runner does."""
    runner, seen = runner_of(run), list[tuple[float, float]]()
    train = runner.train

    def counted(*args: Any) -> Any:
        # Torch counts no fused attention of a CPU.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            result = train(*args)
        seen.append((float(counter.get_total_flops()), float(result.flops or 0)))
        if run.context.rank == 0:
            torch.save((seen, run.progress.floating_point_operations), path)
        return result

    runner.train = counted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "words",
    ["", pytest.param("--no-two-phase --guidance-scale 1", marks=pytest.mark.slow)],
)
def test_a_step_counts_what_torch_counts(tmp_path: Path, words: str) -> None:
    """Count all passes, also of sequences that begin and of those that switch."""
    record = partial(_record_operations, path=tmp_path / "seen.pt")
    run(tmp_path, f"--train-iters 4 --no-encode-first-frame {words}", prepare=record)
    seen, before = torch.load(tmp_path / "seen.pt")
    assert before == sum(ours for _, ours in seen[:-1])
    assert len({ours for _, ours in seen}) > 2
    for theirs, ours in seen:
        # The input of the first layers needs no gradient, which is a small part.
        assert math.isclose(ours, theirs, rel_tol=0.06), (ours, theirs)


@pytest.mark.slow
def test_operations_of_all_replicas_count(tmp_path: Path) -> None:
    for ranks in (1, 2):
        record = partial(_record_operations, path=tmp_path / f"{ranks}.pt")
        sizes = {"ranks": ranks, "batch": 2, "micro": 2 // ranks}
        run(tmp_path, "--train-iters 2", save=str(ranks), prepare=record, **sizes)
    (one, _), (two, _) = (torch.load(tmp_path / f"{ranks}.pt") for ranks in (1, 2))
    assert [ours for _, ours in one] == [ours for _, ours in two]
