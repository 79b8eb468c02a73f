"""Layouts train alike through the whole program; tests of the networks compare gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.train.run import Run
from megatron_ext.video.task import VIDEO
from tests.video.clips import Rows, steps, train

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


def run(clips: Path, valid: Path, save: Path, words: str, **options: Any) -> Rows:
    """A row for each of three steps, of three buckets, and one for the validation after them."""
    flags = f"--seed 1 --video-valid-path {valid} --eval-iters 1 {words}"
    return train(clips, save, flags, **options)


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
def test_layouts_train_alike(
    clips: Path, valid: Path, one_rank: Rows, name: str, tmp_path: Path
) -> None:
    """The loss leaves references out, and ranks hold unequal numbers of image tokens."""
    ranks, words = LAYOUTS[name]
    check(run(clips, valid, tmp_path, words, ranks=ranks), one_rank, TOLERANCE)


def test_four_micro_batches_are_one_large_batch(
    clips: Path, valid: Path, one_rank: Rows, tmp_path: Path
) -> None:
    check(run(clips, valid, tmp_path, "--micro-batch-size 8"), one_rank, 1e-6)


def test_means_of_micro_batches_do_not_depend_on_who_holds_the_text(
    clips: Path, valid: Path, tmp_path: Path
) -> None:
    """The rank with the text holds fewer image tokens, or none of the images'."""
    words = "--no-calculate-per-token-loss --micro-batch-size 1"
    one = run(clips, valid, tmp_path / "one", words)
    for cp in (2, 4):
        layout = f"--context-parallel-size {cp}"
        rows = run(clips, valid, tmp_path / str(cp), f"{words} {layout}", ranks=cp)
        check(rows, one, TOLERANCE)


def compare_draws(run: Run) -> None:
    """Tensor-parallel ranks are given the same times of clips, replicas are not."""
    next_step = run.train_source.next_step

    def compared(num_microbatches: int) -> Any:
        batches: Any = next_step(num_microbatches)
        times = torch.cat([batch.inputs["timesteps"] for batch in batches])
        everyone = [torch.empty_like(times) for _ in range(run.context.layout.world_size)]
        torch.distributed.all_gather(everyone, times)
        ranks = torch.distributed.get_process_group_ranks(run.context.pgs.tp)
        for rank, others in enumerate(everyone):
            assert torch.equal(others, times) == (rank in ranks)
        return batches

    run.train_source.next_step = compared  # type: ignore[method-assign]


def test_mixed_buckets_train_alike_on_replicas(clips: Path, valid: Path, tmp_path: Path) -> None:
    """Each micro-batch of a step has a bucket of its own, and so has each replica."""
    layout = "--sequence-parallel --tensor-model-parallel-size 2"
    one = run(clips, valid, tmp_path / "one", "--mixed-buckets")
    words = f"--mixed-buckets {layout}"
    four = run(clips, valid, tmp_path / "four", words, ranks=4, prepare=compare_draws)
    check(four, one, TOLERANCE)
    sizes = {
        row["tokens_per_second"] * row["seconds_per_iteration"] / 8 for row in (one[0], one[2])
    }
    assert not {round(size, 3) for size in sizes} <= {24, 56, 88}


@pytest.mark.parametrize("kind", ["mmdit", "video-dit"])
def test_stages_exchange_16_bits_wherever_the_last_stage_lies(
    clips: Path, tmp_path: Path, kind: str
) -> None:
    """bf16 losses of a V-shaped schedule are those of one rank, but for the rounding of sums."""
    words = f"--bf16 --video-model {kind} --train-iters 2"
    if kind == "video-dit":
        words = f"{words} --adaln-zero --no-zero-head --video-dit-size mini"
    else:
        words += " --num-single-blocks 4"
    options = {"task": VIDEO}
    wanted = steps(clips, tmp_path / "one", words, **options)
    layout = "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"
    rows = steps(clips, tmp_path / "two", f"{words} {layout}", ranks=2, **options)
    for row, want in zip(rows, wanted, strict=True):
        assert math.isclose(row["loss"], want["loss"], rel_tol=2e-3)
