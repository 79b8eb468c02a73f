"""Layouts train alike through the whole program; gradients are compared in tests/models/mmdit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.training.video.clips import Rows, train

LAYOUTS = {
    "tp2sp pp2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    ),
    "cp2 dp2": (4, "--context-parallel-size 2 --use-distributed-optimizer"),
    "tp2 cp2 pp2": (
        8,
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2",
    ),
}
TOLERANCE = 1e-5


def run(clips: Path, valid: Path, save: Path, words: str, ranks: int = 1) -> Rows:
    """A row for each of three steps, of three buckets, and one for the validation after them."""
    flags = f"--seed 1 --video-valid-path {valid} --eval-iters 1 {words}"
    return train(clips, save, flags, ranks=ranks)


def check(rows: Rows, wanted: Rows, tolerance: float) -> None:
    """The same losses, also of each mode and of each quarter of the times, and the same norms."""
    assert [row["kind"] for row in rows] == ["train"] * 3 + ["evaluation"]
    for row, want in zip(rows, wanted, strict=True):
        names = {name for name in want if name.startswith("loss") or name == "grad_norm"}
        assert names == {name for name in row if name.startswith("loss") or name == "grad_norm"}
        for name in names:
            assert math.isclose(row[name], want[name], rel_tol=tolerance), (name, row, want)


@pytest.fixture(scope="module")
def one_rank(clips: Path, valid: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    rows = run(clips, valid, tmp_path_factory.mktemp("one"), "")
    losses = [row["loss"] for row in rows]
    assert len(set(losses)) == 4 and all(1 < loss < 4 for loss in losses)
    return rows


@pytest.mark.parametrize("name", LAYOUTS)
def test_criterion_15_and_16_layouts_train_alike(
    clips: Path, valid: Path, one_rank: Rows, name: str, tmp_path: Path
) -> None:
    """With references left out of the loss, and image tokens that ranks hold unequally."""
    ranks, words = LAYOUTS[name]
    check(run(clips, valid, tmp_path, words, ranks), one_rank, TOLERANCE)


def test_criterion_17_four_micro_batches_are_one_large_batch(
    clips: Path, valid: Path, one_rank: Rows, tmp_path: Path
) -> None:
    check(run(clips, valid, tmp_path, "--micro-batch-size 8"), one_rank, 1e-6)


def test_criterion_15_mixed_buckets_train_alike_on_replicas(
    clips: Path, valid: Path, tmp_path: Path
) -> None:
    """Each micro-batch of a step has a bucket of its own, and so has each rank."""
    words = "--mixed-buckets --sequence-parallel --tensor-model-parallel-size"
    one = run(clips, valid, tmp_path / "one", "--mixed-buckets")
    two = run(clips, valid, tmp_path / "four", f"{words} 2", ranks=4)
    check(two, one, TOLERANCE)
