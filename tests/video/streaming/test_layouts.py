"""The same run on other ranks, with its batch cut otherwise, and in 16 bits."""

import copy
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.train.run import Run
from megatron_ext.video.streaming.rollout import StreamClip
from tests.checkpoint.tiny import whole_tensors
from tests.video.streaming import runs

STEPS = 3
TP = "--tensor-model-parallel-size 2"
CP = "--context-parallel-size 2"
ALL = f"{TP} {CP} --sequence-parallel --cp-comm-type a2a"


@dataclass(frozen=True)
class Result:
    """The log of a run, and the weights of generator and critic after it."""

    rows: runs.Rows
    weights: dict[str, Tensor]


def trained(folder: Path, words: str, *, ranks: int = 1, micro: int = 2, batch: int = 2) -> Result:
    """Train by gradient descent, whose weights are linear in the gradients and so compare them."""
    # Of Adam's epsilon and of momentum there is none, the rates are large.
    words = f"--train-iters {STEPS} --optimizer sgd --sgd-momentum 0 --lr 0.2 {words}"
    words += " --critic-lr 0.1 --ema-decay 0"
    rows = runs.run(folder, words, ranks=ranks, micro=micro, batch=batch, start=1)
    stored = whole_tensors(folder / "save" / f"iter_{STEPS:07d}", folder / "whole.pt")
    kept = {k: x for k, x in stored.items() if "optimizer" not in k}
    assert any(k.startswith("critic.") for k in kept)
    return Result(rows, kept)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return trained(tmp_path_factory.mktemp("one"), "")


SID = "--distribution-loss sid --sid-alpha 1.2 --denoising-loss v --ts-schedule --ts-schedule-max"


@pytest.fixture(scope="module")
def sid(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return trained(tmp_path_factory.mktemp("sid"), SID)


def check_same(found: Result, wanted: Result, tolerance: float = 1e-5) -> None:
    for row, want in zip(found.rows, wanted.rows, strict=True):
        expected = runs.losses_of(want)
        assert {"critic loss", "critic grad norm"} <= expected.keys()
        for name, value in expected.items():
            assert math.isclose(row[name], value, rel_tol=tolerance), (row["iteration"], name)
    assert "dmdtrain_gradient_norm" in wanted.rows[0]
    assert found.weights.keys() == wanted.weights.keys()
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    for name, tensor in wanted.weights.items():
        close(found.weights[name], tensor, msg=name)


@pytest.mark.parametrize(
    ("ranks", "micro", "words"),
    [
        (2, 2, TP),
        (2, 1, ""),
        (2, 2, f"{CP} --cp-comm-type a2a"),
        pytest.param(2, 2, f"{CP} --cp-comm-type all_gather", marks=pytest.mark.slow),
        pytest.param(2, 2, f"{TP} --sequence-parallel", marks=pytest.mark.slow),
        pytest.param(4, 2, f"{TP} {CP}", marks=pytest.mark.slow),
        pytest.param(4, 2, ALL, marks=pytest.mark.slow),
        pytest.param(4, 1, TP, marks=pytest.mark.slow),
    ],
)
def test_layouts_are_alike(tmp_path: Path, one: Result, ranks: int, micro: int, words: str) -> None:
    check_same(trained(tmp_path, words, ranks=ranks, micro=micro), one)


ALONE = "--independent-first-frame --chunk-frames 10"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return trained(tmp_path_factory.mktemp("alone"), ALONE)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, TP),
        pytest.param(2, f"{CP} --cp-comm-type a2a", marks=pytest.mark.slow),
        pytest.param(2, f"{CP} --cp-comm-type all_gather", marks=pytest.mark.slow),
    ],
)
def test_a_first_frame_alone_trains_alike(
    tmp_path: Path, alone: Result, ranks: int, words: str
) -> None:
    check_same(trained(tmp_path, f"{ALONE} {words}", ranks=ranks), alone)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, f"{CP} --cp-comm-type all_gather"),
        (4, ALL),
        pytest.param(2, TP, marks=pytest.mark.slow),
        pytest.param(2, f"{CP} --cp-comm-type a2a", marks=pytest.mark.slow),
        pytest.param(2, f"{TP} --sequence-parallel --recompute-blocks 1", marks=pytest.mark.slow),
    ],
)
def test_distilled_gradients_are_whole(tmp_path: Path, sid: Result, ranks: int, words: str) -> None:
    check_same(trained(tmp_path, f"{SID} {words}", ranks=ranks), sid)


def test_weights_move_far_more_than_the_tolerance(one: Result, tmp_path: Path) -> None:
    start = trained(tmp_path, "--clip-grad 1e-12 --critic-clip-grad 1e-12")
    for prefix in ("blocks.", "critic.blocks."):
        names = [name for name in one.weights if name.startswith(prefix)]
        moved = [(one.weights[name] - start.weights[name]).abs().max() for name in names]
        assert float(max(moved)) > 1e-3, prefix


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP, CP])
def test_means_of_clips_are_alike_too(tmp_path: Path, layout: str) -> None:
    mean = "--no-calculate-per-token-loss"
    wanted = trained(tmp_path / "one", mean)
    check_same(trained(tmp_path / "two", f"{mean} {layout}", ranks=2), wanted)


STILL = "--optimizer sgd --sgd-momentum 0 --lr 1e-30 --critic-lr 1e-30 --ema-decay 0"
"""Weights that do not move, so that all clips meet the same ones."""


def _gradients(run: Run) -> list[dict[str, Any]]:
    """Note the reduced gradients of both networks in each step, and its counted frames."""
    seen: list[dict[str, Any]] = []
    frames: dict[str, list[int]] = {"generator": [], "critic": []}

    def count(clip: StreamClip, trains_generator: bool) -> None:
        frames["generator" if trains_generator else "critic"].append(int(clip.mask.sum()))

    def observe() -> None:
        grads = {
            (role, name): p.main_grad.clone()
            for role, network in runs.by_network(run, lambda x: x.network).items()
            for name, p in unwrap_model([network])[0].named_parameters()
        }
        seen.append({"grads": grads, "frames": copy.deepcopy(frames)})
        for counts in frames.values():
            counts.clear()

    runs.on_each_clip(run, count)
    runs.runner_of(run).observer = observe
    return seen


@pytest.mark.parametrize("per_frame", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_frames_of_accumulated_clips_count_or_clips_do(tmp_path: Path, per_frame: bool) -> None:
    """Compare a step of two clips for each network with two steps of one."""
    words = "" if per_frame else "--no-calculate-per-token-loss"
    found = []
    for batch, steps in ((2, 1), (1, 2)):
        flags = f"--train-iters {steps} {STILL} {words}"
        sizes = {"batch": batch, "interval": 1, "start": 1, "save": str(batch)}
        found.append(runs.observed(tmp_path, flags, _gradients, **sizes)[1][0])
    (both,), (first, second) = found
    # The first frame of clips but the first is an image; those before a switch are of the past.
    shares = {}
    for role, (a, b) in both["frames"].items():
        assert [a] == first["frames"][role] and [b] == second["frames"][role]
        shares[role] = a / (a + b) if per_frame else 0.5
    assert both["frames"]["generator"][0] != both["frames"]["generator"][1]
    for key, grad in both["grads"].items():
        weight = shares[key[0]]
        want = weight * first["grads"][key] + (1 - weight) * second["grads"][key]
        scale = float(want.abs().max())
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5 * scale, msg=str(key))
    assert any(float(x.abs().max()) > 0 for k, x in both["grads"].items() if k[0] == "generator")


@pytest.mark.slow
def test_accumulation_over_two_replicas_is_that_of_two_videos_on_one(tmp_path: Path) -> None:
    wanted = trained(tmp_path / "one", "", micro=2, batch=4)
    check_same(trained(tmp_path / "two", "", ranks=2, micro=1, batch=4), wanted)


@pytest.mark.parametrize("layout", ["", pytest.param(TP, marks=pytest.mark.slow)])
def test_a_bf16_run_stays_near_that_of_fp32(tmp_path: Path, layout: str) -> None:
    """Allow for a rounding error of 2 ** -9 in each product, and for clips made with it."""
    ranks, words = (2 if layout else 1), "--train-iters 5 --lr 1e-4 --critic-lr 1e-4"
    exact = runs.run(tmp_path, words, save="fp32")
    rough = runs.run(tmp_path, f"{words} --bf16 {layout}", ranks=ranks, save="bf16")
    differences = []
    for row, want in zip(rough, exact, strict=True):
        found, expected = runs.losses_of(row), runs.losses_of(want)
        assert found == pytest.approx(expected, rel=0.03), row["iteration"]
        differences.append(found != expected)
    assert any(differences)
