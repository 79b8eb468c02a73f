"""The changes, constants, counts and averages of the steps of a streaming run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext.optim.update import global_grad_norm, parts_of
from megatron_ext.train.run import Run
from megatron_ext.video.streaming.rollout import StreamClip
from tests.checkpoint.tiny import whole_tensors
from tests.video.streaming import runs

STEPS, INTERVAL = 10, 5
Recorded = tuple[runs.Rows, dict[str, Any]]
TRAINED = [step % INTERVAL == 0 for step in range(STEPS)]


def _networks(run: Run) -> dict[str, Any]:
    """Note the weights of all networks before and after each step, and the clips."""
    runner = runs.runner_of(run)

    def everything() -> dict[str, Any]:
        of_teacher = {"teacher": runs.weights(runner.teacher)}
        return runs.by_network(run, lambda x: runs.weights(x.network)) | of_teacher

    content: dict[str, Any] = {
        "weights": [everything()],
        "chunks": [],
        "memo": [],
        "clip_grad": runs.by_network(run, lambda x: x.clip_grad),
        "betas": [
            group["betas"]
            for network in (runner.generator, runner.critic)
            for part in parts_of(network.optimizer)
            for group in part.optimizer.param_groups
        ],
        "optimized": sum(runs.by_network(run, runs.num_optimized).values()),
        "buffers": [hasattr(p, "main_grad") for p in runner.teacher.parameters()],
        "teacher": [(p.requires_grad, p.grad) for p in runner.teacher.parameters()],
    }

    def note(_: Any) -> None:
        content["weights"].append(everything())
        content["memo"].append(runner.sequence.generator.cache.memo.is_filled)

    def note_clip(clip: StreamClip, trains: bool) -> None:
        content["chunks"].append((clip.sequence, clip.number, "gc"[not trains]))

    runs.after_each_step(run, note)
    runs.on_each_clip(run, note_clip)
    return content


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("step")
    rows, (seen,) = runs.observed(folder, f"--train-iters {STEPS}", _networks, interval=INTERVAL)
    return rows, seen


def test_the_generator_is_trained_every_fifth_step(recorded: Recorded) -> None:
    rows, seen = recorded
    pairs = list(zip(seen["weights"], seen["weights"][1:], strict=False))
    assert [runs.differ(a["generator"], b["generator"]) for a, b in pairs] == TRAINED
    assert all(runs.differ(a["critic"], b["critic"]) for a, b in pairs)
    assert set(seen["betas"]) == {(0.0, 0.999)} and set(seen["clip_grad"].values()) == {10.0}
    # The first step is reported once more in the second line, as in all runs.
    logged = ["generator loss" in row for row in rows]
    assert logged[:1] + logged[2:] == TRAINED[:1] + TRAINED[2:]
    for row, trains in zip(rows[2:], TRAINED[2:], strict=True):
        assert ("dmdtrain_gradient_norm" in row) == ("generator grad norm" in row) == trains
        loss, norm = row["critic loss"], row["critic grad norm"]
        assert (row["train/loss"], row["grad_norm"]) == (loss, norm)
        assert math.isfinite(loss) and loss > 0 and norm > 0
        assert row["seconds_per_iteration"] > 0


def _applied_norms(run: Run) -> dict[str, float]:
    applied: dict[str, float] = {}
    for name, network in runs.by_network(run, lambda x: x).items():

        def noted(name: str = name, optimizer: Any = network.optimizer) -> Any:
            applied[name] = global_grad_norm(optimizer)
            return type(optimizer).step_with_ready_grads(optimizer)

        network.optimizer.step_with_ready_grads = noted
    return applied


def test_networks_are_clipped_alone(tmp_path: Path, recorded: Recorded) -> None:
    words = "--train-iters 1 --clip-grad 0.002 --critic-clip-grad 0.003"
    (row,), (applied,) = runs.observed(tmp_path, words, _applied_norms, interval=INTERVAL)
    assert applied == pytest.approx({"generator": 0.002, "critic": 0.003}, rel=1e-3)
    # Logged is what the gradients were before, as in the run that clips at 10.
    for name in ("generator grad norm", "critic grad norm"):
        assert row[name] == recorded[0][0][name] > 0.003


def test_a_refused_update_of_one_network_leaves_the_other(tmp_path: Path) -> None:
    """Put a NaN into the critic's gradients: the generator and its average still move."""

    def spoil(run: Run) -> dict[str, Any]:
        runner, ema = runs.runner_of(run), run.ema
        assert ema is not None
        reduce, update = type(runner.critic).reduce, ema.update
        before = runs.by_network(run, lambda x: runs.weights(x.network))
        content: dict[str, Any] = {"moved": []}

        def spoiled(self: Any, *args: Any, **options: Any) -> None:
            reduce(self, *args, **options)
            if self is runner.critic:
                next(iter(self.network.parameters())).main_grad.fill_(math.nan)

        def noted(step: int, **options: Any) -> None:
            content["moved"].append(step)
            update(step, **options)

        def check(_: Any) -> None:
            after = runs.by_network(run, lambda x: runs.weights(x.network))
            content["changed"] = [runs.differ(before[name], after[name]) for name in before]

        type(runner.critic).reduce = spoiled  # type: ignore[method-assign]
        ema.update = noted  # type: ignore[method-assign]
        runs.after_each_step(run, check)
        return content

    rows, (seen,) = runs.observed(tmp_path, "--train-iters 2", spoil, interval=INTERVAL)
    assert seen == {"changed": [True, False], "moved": [1]}
    assert [row["skipped_iterations"] for row in rows] == [1, 1]


def _operations(run: Run) -> dict[str, Any]:
    """Note what torch counts of each step, what the runner does, and their sum in the log."""
    runner = runs.runner_of(run)
    train, content = runner.train, dict[str, Any](steps=[])

    def counted(*args: Any) -> Any:
        # Torch counts no fused attention of a CPU.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            result = train(*args)
        content["steps"].append((float(counter.get_total_flops()), float(result.flops or 0)))
        content["logged"] = run.progress.floating_point_operations
        return result

    runner.train = counted  # type: ignore[method-assign]
    return content


@pytest.mark.parametrize(
    "words", ["", pytest.param("--no-two-phase --guidance-scale 1", marks=pytest.mark.slow)]
)
def test_a_step_counts_what_torch_counts(tmp_path: Path, words: str) -> None:
    """Count all passes, also of sequences that begin and of those that switch."""
    words = f"--train-iters 4 --no-encode-first-frame {words}"
    _, (content,) = runs.observed(tmp_path, words, _operations)
    seen = content["steps"]
    assert content["logged"] == sum(ours for _, ours in seen[:-1])
    assert len({ours for _, ours in seen}) > 2
    for theirs, ours in seen:
        # The input of the first layers needs no gradient, which is a small part.
        assert math.isclose(ours, theirs, rel_tol=0.06), (ours, theirs)


@pytest.mark.slow
def test_operations_of_all_replicas_count(tmp_path: Path) -> None:
    counted = []
    for ranks in (1, 2):
        sizes = {"ranks": ranks, "batch": 2, "micro": 2 // ranks}
        _, noted = runs.observed(tmp_path, "--train-iters 2", _operations, save=str(ranks), **sizes)
        counted.append([ours for _, ours in noted[0]["steps"]])
    assert counted[0] == counted[1]


AVERAGED, DECAY = 7, 0.8


def _generators(run: Run) -> list[dict[str, Tensor]]:
    seen: list[dict[str, Tensor]] = []
    network = runs.runner_of(run).generator.network
    runs.after_each_step(run, lambda _: seen.append(runs.weights(network)))
    return seen


def stored(folder: Path) -> dict[str, Tensor]:
    return whole_tensors(folder / f"iter_{AVERAGED:07d}", folder / "whole.pt")


def averages(folder: Path) -> dict[str, Tensor]:
    found = stored(folder)
    return {k.removeprefix("ema."): x for k, x in found.items() if k.startswith("ema.")}


@pytest.mark.parametrize(
    ("words", "start", "steps"),
    [
        ("", 4, (2, 4, 6)),
        ("--ema-update-every 2", 2, (0, 2, 6)),
        pytest.param("", 200, (6,), marks=pytest.mark.slow),
    ],
)
def test_average_of_updates(tmp_path: Path, words: str, start: int, steps: tuple[int, ...]) -> None:
    """Average from the first of the steps on; a start that has not come leaves the weights."""
    words = f"--train-iters {AVERAGED} {words}"
    _, (after,) = runs.observed(tmp_path, words, _generators, start=start)
    found = averages(tmp_path / "save")
    assert found.keys() == after[-1].keys()
    for name, average in found.items():
        want = after[steps[0]][name].double()
        for step in steps[1:]:
            want = DECAY * want + (1 - DECAY) * after[step][name].double()
        torch.testing.assert_close(average.double(), want, rtol=1e-6, atol=1e-8, msg=name)
        if len(steps) > 1 and after[steps[0]][name].ne(after[6][name]).any():
            assert not torch.equal(average, after[6][name]), name


@pytest.mark.slow
def test_sharded_averages_are_the_whole_ones_bit_for_bit(tmp_path: Path) -> None:
    for name in ("", "no-"):
        words = f"--train-iters {AVERAGED} --{name}use-distributed-optimizer"
        runs.run(tmp_path, words, ranks=2, batch=2, start=4, save=f"{name}sharded")
    found, wanted = stored(tmp_path / "sharded"), stored(tmp_path / "no-sharded")
    names = [name for name in wanted if "optimizer" not in name]
    assert any(name.startswith("ema.") for name in names)
    assert any(name.startswith("critic.") for name in names)
    for name in names:
        assert torch.equal(found[name], wanted[name]), name


def test_passes_advance_one_sequence_and_no_teacher(recorded: Recorded) -> None:
    kinds = "".join("gc" if trains else "c" for trains in TRAINED)
    wanted = [(i // runs.CLIPS, i % runs.CLIPS, kind) for i, kind in enumerate(kinds)]
    assert recorded[1]["chunks"] == wanted
    # Keys of past frames belong to what was generated, those of the text do not.
    assert recorded[1]["memo"] == [not trains for trains in TRAINED]
    seen = recorded[1]
    first, last = seen["weights"][0], seen["weights"][-1]
    assert not runs.differ(first["teacher"], last["teacher"])
    assert not any(seen["buffers"])
    assert seen["teacher"] == [(False, None)] * len(first["teacher"])
    # It starts apart from critic and generator, and in no optimizer.
    assert runs.differ(first["teacher"], first["critic"])
    trained = [p.numel() for name in ("generator", "critic") for p in first[name].values()]
    assert seen["optimized"] == sum(trained)
