"""The same run on other ranks, and with its batch cut otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.tiny import whole_tensors
from tests.video.streaming.runs import Rows, losses_of, run

STEPS = 3
TP = "--tensor-model-parallel-size 2"
CP = "--context-parallel-size 2"


@dataclass(frozen=True)
class Result:
    """What a run logged, and the weights of generator and critic after it."""

    rows: Rows
    weights: dict[str, Tensor]


def trained(folder: Path, words: str, *, ranks: int = 1, micro: int = 2, batch: int = 2) -> Result:
    """A run of two videos at a time, by gradient descent: what the weights have moved is linear in
    the gradients, whatever their size, so that weights compare the gradients too.
    """
    # Of Adam's epsilon and of momentum there is none, the rates are large.
    words = f"--train-iters {STEPS} --optimizer sgd --sgd-momentum 0 --lr 0.2 {words}"
    words += " --critic-lr 0.1 --ema-decay 0"
    rows = run(folder, words, ranks=ranks, micro=micro, batch=batch, start=1)
    stored = whole_tensors(folder / "save" / f"iter_{STEPS:07d}", folder / "whole.pt")
    kept = {k: x for k, x in stored.items() if "optimizer" not in k}
    assert any(k.startswith("critic.") for k in kept)
    return Result(rows, kept)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One rank, two videos in a micro-batch."""
    return trained(tmp_path_factory.mktemp("one"), "")


SID = "--distribution-loss sid --sid-alpha 1.2 --denoising-loss v --ts-schedule --ts-schedule-max"


@pytest.fixture(scope="module")
def sid(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The same by score identity distillation."""
    return trained(tmp_path_factory.mktemp("sid"), SID)


def check_same(found: Result, wanted: Result, tolerance: float = 1e-5) -> None:
    """Losses, mean |D|, gradient norms and weights."""
    for row, want in zip(found.rows, wanted.rows, strict=True):
        expected = losses_of(want)
        assert {"critic loss", "critic grad norm"} <= expected.keys()
        for name, value in expected.items():
            assert math.isclose(row[name], value, rel_tol=tolerance), (row["iteration"], name)
    assert "dmdtrain_gradient_norm" in wanted.rows[0]
    assert found.weights.keys() == wanted.weights.keys()
    for name, tensor in wanted.weights.items():
        torch.testing.assert_close(
            found.weights[name], tensor, rtol=tolerance, atol=tolerance, msg=name
        )


@pytest.mark.parametrize(
    ("ranks", "micro", "words"),
    [
        (2, 2, TP),
        (2, 1, ""),
        (2, 2, f"{CP} --cp-comm-type a2a"),
        pytest.param(2, 2, f"{CP} --cp-comm-type all_gather", marks=pytest.mark.slow),
        pytest.param(2, 2, f"{TP} --sequence-parallel", marks=pytest.mark.slow),
        pytest.param(4, 2, f"{TP} {CP}", marks=pytest.mark.slow),
        pytest.param(4, 2, f"{TP} {CP} --sequence-parallel --cp-comm-type a2a",
                     marks=pytest.mark.slow),
        pytest.param(4, 1, TP, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_layouts_train_alike(
    tmp_path: Path, one: Result, ranks: int, micro: int, words: str
) -> None:
    check_same(trained(tmp_path, words, ranks=ranks, micro=micro), one)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, f"{CP} --cp-comm-type all_gather"),
        (4, f"{TP} {CP} --sequence-parallel --cp-comm-type a2a"),
        pytest.param(2, TP, marks=pytest.mark.slow),
        pytest.param(2, f"{CP} --cp-comm-type a2a", marks=pytest.mark.slow),
        pytest.param(2, f"{TP} --sequence-parallel --recompute-blocks 1", marks=pytest.mark.slow),
    ],
)
def test_gradients_through_critic_and_teacher_are_whole_on_all_layouts(
    tmp_path: Path, sid: Result, ranks: int, words: str
) -> None:
    check_same(trained(tmp_path, f"{SID} {words}", ranks=ranks), sid)


def test_weights_move_far_more_than_the_tolerance(one: Result, tmp_path: Path) -> None:
    """Else the comparison of weights would say nothing."""
    start = trained(tmp_path, "--clip-grad 1e-12 --critic-clip-grad 1e-12")
    for prefix in ("blocks.", "critic.blocks."):
        moved = [
            float((tensor - start.weights[name]).abs().max())
            for name, tensor in one.weights.items()
            if name.startswith(prefix)
        ]
        assert moved and max(moved) > 1e-3, prefix


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP, CP])
def test_means_of_clips_are_alike_too(tmp_path: Path, layout: str) -> None:
    mean = "--no-calculate-per-token-loss"
    wanted = trained(tmp_path / "one", mean)
    check_same(trained(tmp_path / "two", f"{mean} {layout}", ranks=2), wanted)
