"""Runs in 16 bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.video.streaming.runs import losses_of, run

STEPS = 5


@pytest.mark.parametrize("layout", ["", pytest.param(
    "--tensor-model-parallel-size 2", marks=pytest.mark.slow)])  # fmt: skip
def test_a_bf16_run_stays_near_that_of_fp32(tmp_path: Path, layout: str) -> None:
    """Its rounding error is 2 ** -9 in each product, and the critic sees clips made so."""
    ranks, words = (2 if layout else 1), f"--train-iters {STEPS} --lr 1e-4 --critic-lr 1e-4"
    exact = run(tmp_path, words, save="fp32")
    rough = run(tmp_path, f"{words} --bf16 {layout}", ranks=ranks, save="bf16")
    differences = []
    for row, want in zip(rough, exact, strict=True):
        assert losses_of(row).keys() == losses_of(want).keys()
        for name, value in losses_of(want).items():
            assert math.isclose(row[name], value, rel_tol=0.03), (row["iteration"], name)
            differences.append(row[name] != value)
    assert any(differences)
