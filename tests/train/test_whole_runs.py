"""Whole runs: skipped steps, the schedule of the learning rate, resumed data, validation."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.text.task import GPT
from megatron_ext.train.run import Run
from tests.training_runs import (
    LAYOUTS,
    NULL,
    SAME_WEIGHTS,
    TINY,
    Rows,
    documents,
    mock_data,
    prepared,
    train,
    train_steps,
    training_rows,
    without,
)


def steps_of(
    folder: Path, words: str, layout: str = "one", prepare: Callable[[Run], None] | None = None
) -> Rows:
    ranks, more = LAYOUTS[layout]
    flags = [*SAME_WEIGHTS, *mock_data(), "--eod-mask-loss", *words.split(), *more.split()]
    return train_steps(flags, folder, ranks, prepare=prepare)


def observe(run: Run, folder: Path, note: Callable[[bool], dict[str, Any]]) -> None:
    """Write notes on each step, one file for each rank and step."""
    inner = run.runner.train

    def train(*arguments: Any) -> Any:
        before = {name: p.detach().clone() for name, p in parameters(run)}
        rates = [group["lr"] for group in run.optimizer.param_groups]  # type: ignore[union-attr]
        result = inner(*arguments)
        same = all(torch.equal(before[name], p) for name, p in parameters(run))
        note_of = {"rate": rates[0], "unchanged": same, "applied": result.update.applied}
        path = folder / f"rank{run.context.rank}_step{run.progress.iteration + 1}.json"
        path.write_text(json.dumps({**note_of, **note(result.update.applied)}))
        return result

    run.runner.train = train  # type: ignore[method-assign]


def parameters(run: Run) -> list[tuple[str, Tensor]]:
    return [(f"{i}.{n}", p) for i, c in enumerate(run.chunks) for n, p in c.named_parameters()]


def notes(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"rank*_step{step}.json"))]


def poison(run: Run, *, rank: int, step: int, value: float, folder: Path) -> None:
    """Spoil one number of one weight's gradient on one rank in the backward pass of one step."""
    observe(run, folder, lambda applied: {})
    if run.context.rank != rank:
        return

    def spoil(grad: Tensor) -> Tensor:
        if run.progress.iteration + 1 != step:
            return grad
        grad = grad.clone()
        grad.view(-1)[0] = value
        return grad

    # The head adds its gradient to the buffer itself, where no hook sees it.
    weights = [p for name, p in parameters(run) if name.endswith("linear_fc2.weight")]
    weights[-1].register_hook(spoil)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("layout", ["dp2", "dp2plain", "tp2pp2"])
def test_a_bad_gradient_skips_the_step_on_all(layout: str, value: float, tmp_path: Path) -> None:
    ranks = LAYOUTS[layout][0]
    spoil = partial(poison, rank=ranks - 1, step=2, value=value, folder=tmp_path)
    rows = steps_of(tmp_path / "save", "--train-iters 3", layout, spoil)
    for step, skipped in ((1, False), (2, True), (3, False)):
        seen = notes(tmp_path, step)
        assert len(seen) == ranks
        assert all(note["applied"] is not skipped for note in seen)
        # At step 1 the learning rate is 0, so the weights may only change at step 3.
        assert all(note["unchanged"] for note in seen) is (step != 3)
    assert [row["train/skipped_iterations"] for row in rows] == [0, 1, 1]
    assert [row["skipped_iterations"] for row in rows] == [0, 1, 0]
    assert [math.isfinite(row["train/grad_norm"]) for row in rows] == [True, False, True]
    # The schedule waits for the update that did not happen; samples and iterations do not.
    assert rows[1]["train/lr"] == rows[0]["train/lr"] < rows[2]["train/lr"]
    assert [row["consumed_samples"] for row in rows] == [16, 32, 48]


def test_a_skipped_step_is_announced_once_when_it_happens(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next report comes after four iterations only."""
    spoil = partial(poison, rank=1, step=2, value=math.inf, folder=tmp_path)
    steps_of(tmp_path / "save", "--train-iters 4 --log-interval 4", "dp2", spoil)
    lines = capfd.readouterr().out.splitlines()
    (at,) = [i for i, line in enumerate(lines) if "was skipped" in line]
    assert lines[at] == "> iteration 2 was skipped: its gradient norm is inf (1 skipped so far)"
    (last,) = [i for i, line in enumerate(lines) if " iteration        4/" in line]
    assert at < last


def dense_norm(run: Run, folder: Path) -> None:
    """Note the norms of the whole gradient and of the gradient that the update applied."""
    squares: list[float] = []

    def whole() -> None:
        grads = [p.main_grad.double() for _, p in parameters(run)]  # type: ignore[attr-defined]
        squares.append(float(sum(g.square().sum() for g in grads)))

    def note(applied: bool) -> dict[str, Any]:
        grads = [p.grad.double() for p in run.optimizer.get_parameters()]  # type: ignore[union-attr]
        return {
            "before": squares[-1] if squares else None,
            "after": float(sum(g.square().sum() for g in grads)),
        }

    if run.context.layout.world_size == 1:
        run.runner.observer = whole
    observe(run, folder, note)


def test_the_logged_norm_is_the_dense_one_before_clipping(tmp_path: Path) -> None:
    """Weights ten times as large make a gradient that must be clipped."""
    words = "--train-iters 2 --init-method-std 0.2 --clip-grad 1.0"
    norms: dict[str, list[float]] = {}
    for layout in ("one", "dp2", "tp2pp2"):
        folder = tmp_path / layout
        folder.mkdir()
        rows = steps_of(folder / "save", words, layout, partial(dense_norm, folder=folder))
        norms[layout] = [row["train/grad_norm"] for row in rows]
        assert min(norms[layout]) > 1.5
        if layout != "tp2pp2":
            # The replicas hold disjoint shards of the gradient that the update applies.
            applied = [sum(note["after"] for note in notes(folder, step)) for step in (1, 2)]
            assert [math.sqrt(square) for square in applied] == pytest.approx([1.0, 1.0], rel=1e-5)
    dense = [math.sqrt(notes(tmp_path / "one", step)[0]["before"]) for step in (1, 2)]
    for layout, logged in norms.items():
        assert logged == pytest.approx(dense, rel=1e-5), layout


@pytest.mark.parametrize("steps", [8, 16])
def test_the_schedule_starts_at_zero_and_ends_with_the_run(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = without(SAME_WEIGHTS, "--lr-warmup-iters", "--lr-decay-iters")
    monkeypatch.setitem(globals(), "SAME_WEIGHTS", flags)
    watch = partial(observe, folder=tmp_path, note=lambda applied: {})
    words = f"--train-iters {steps} --lr-warmup-fraction 0.25"
    rows = steps_of(tmp_path / "save", words, prepare=watch)
    used = [notes(tmp_path, step)[0]["rate"] for step in range(1, steps + 1)]
    warmup = steps // 4
    assert used[0] == 0.0
    assert used[warmup] == 1e-3 == max(used)
    assert used[: warmup + 1] == sorted(set(used[: warmup + 1]))
    assert used[warmup:] == sorted(set(used[warmup:]), reverse=True)
    assert rows[-1]["train/lr"] == pytest.approx(1e-4, rel=1e-6)


def test_evaluating_changes_no_step(tmp_path: Path) -> None:
    """Evaluation switches dropout off, and on again."""
    words = "--train-iters 3 --attention-dropout 0.1 --hidden-dropout 0.1 --eval-iters 1"
    curves = []
    for interval in (1, 100):
        rows = steps_of(tmp_path / str(interval), f"{words} --eval-interval {interval}")
        curves.append([(row["lm loss"], row["grad_norm"]) for row in rows])
    assert curves[0] == curves[1] and len(curves[0]) == 3


def digest_data(run: Run, folder: Path) -> None:
    inner, digests = run.train_source.next_step, list[str]()

    def next_step(num_microbatches: int, seq_length: int | None) -> Any:
        batches = inner(num_microbatches, seq_length)
        digest = hashlib.sha256()
        for batch in batches or ():
            digest.update(batch.tokens.numpy().tobytes())
        digests.append(digest.hexdigest())
        return batches

    run.train_source.next_step = next_step  # type: ignore[method-assign]
    observe(run, folder, lambda applied: {"data": digests[-1]})


@pytest.mark.parametrize(("layout", "loader"), [("dp2", "cyclic"), ("tp2pp2", "single")])
def test_a_resumed_run_repeats_rate_and_loss(layout: str, loader: str, tmp_path: Path) -> None:
    prefix = documents(tmp_path / "docs", 30)
    data = without(TINY, "--eval-iters", "--eval-interval", "--split")
    words = [*data, *NULL, "--data-path", prefix, "--split", "80,20,0", "--eod-mask-loss"]
    words += "--train-iters 7 --eval-iters 1 --eval-interval 2 --num-workers 0".split()
    words += ["--dataloader-type", loader, *LAYOUTS[layout][1].split()]
    found: dict[str, tuple[Rows, list[list[dict[str, Any]]]]] = {}
    for name, parts in {"whole": [""], "broken": ["--exit-interval 3", ""]}.items():
        folder, save = tmp_path / name, tmp_path / name / "save"
        folder.mkdir()
        for part in parts:
            more = ["--resume-mode", "auto", *part.split()]
            prepare = partial(digest_data, folder=folder)
            rows = train([*words, *more], save, LAYOUTS[layout][0], prepare=prepare)
        kept = [row for row in rows if row["kind"] != "resumed"]
        found[name] = kept, [notes(folder, step) for step in range(1, 8)]
    assert len(training_rows(rows)) == 7
    assert found["broken"][1] == found["whole"][1]
    for key in ("lm loss", "learning_rate", "train/grad_norm", "consumed_samples"):
        mine, want = ([row.get(key) for row in found[name][0]] for name in ("broken", "whole"))
        assert mine == want, key


def validation_losses(rows: Rows) -> list[float]:
    return [row["lm loss"] for row in rows if row["kind"] == "evaluation"]


def dense_loss(run: Run, folder: Path, flags: Sequence[str]) -> None:
    """Write the loss over all targets of the validation split, by torch's own cross-entropy."""
    _, config, tokenizer = prepared(flags, ranks=1)
    dataset = GPT.datasets(config, tokenizer, [16, None, 0], lambda: True).valid
    total, count = 0.0, 0.0
    chunk = run.chunks[0].eval()
    for sample in dataset:
        ids, positions = sample["tokens"][None], sample["position_ids"][None]
        with torch.no_grad():
            logits = chunk(ids, positions, None).double()[0]
        losses = torch.nn.functional.cross_entropy(logits, sample["labels"], reduction="none")
        total += float((losses * sample["loss_mask"]).sum())
        count += float(sample["loss_mask"].sum())
    chunk.train()
    (folder / "dense.json").write_text(json.dumps([total / count, len(dataset)]))


def test_validation_is_the_sum_over_all_targets(tmp_path: Path) -> None:
    """About eleven samples in batches of 16 or 4: none is left out, and none counts twice."""
    prefix = documents(tmp_path / "docs", 40)
    tiny = without(
        SAME_WEIGHTS, "--split", "--eval-interval", "--micro-batch-size", "--global-batch-size"
    )
    common = [*tiny, *NULL, "--data-path", prefix, "--split", "70,30,0", "--full-validation"]
    common += (
        "--eod-mask-loss --train-iters 2 --eval-interval 1 --lr 0 --min-lr 0 "
        "--padded-vocab-size 128"
    ).split()
    shapes = [(1, 4, "one"), (2, 16, "one"), (2, 4, "dp2"), (1, 8, "tp2pp2")]
    for micro, batch, layout in shapes:
        ranks, more = LAYOUTS[layout]
        flags = [*common, *f"--micro-batch-size {micro} --global-batch-size {batch}".split()]
        flags += more.split()
        first = (micro, batch) == (1, 4)
        prepare = partial(dense_loss, folder=tmp_path, flags=flags) if first else None
        rows = train(flags, tmp_path / f"{micro}_{batch}_{layout}", ranks, prepare=prepare)
        want, samples = json.loads((tmp_path / "dense.json").read_text())
        assert samples % 4 and samples % 8
        # Every pass begins anew: two while training and one after it.
        assert validation_losses(rows) == pytest.approx([want] * 3, rel=1e-6), (micro, batch)


@pytest.mark.parametrize("full", ["--eval-iters 1", "--full-validation"])
def test_no_validation_set_is_no_failure(full: str, tmp_path: Path) -> None:
    flags = without(TINY, "--split", "--eval-interval", "--eval-iters")
    source = [*NULL, "--data-path", documents(tmp_path / "docs", 20)]
    words = f"--split 100,0,0 --eval-interval 1 --train-iters 2 {full}"
    rows = train([*flags, *source, *words.split()], tmp_path / "save")
    assert len(training_rows(rows)) == 2
    assert validation_losses(rows) == []
