"""Differences as a person would compute them."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from megatron_ext.inspect.parity import (
    Recording,
    Tolerances,
    compare,
    gradient_difference,
    parse_layout,
    read_gradients,
    relative,
    table,
)


def recording(folder: Path, name: str, loss: float = 2.0, gradient: float = 1.0) -> Recording:
    """Write a run of two steps; the second has the values given."""
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for step, (value, g) in enumerate([(3.0, 1.0), (loss, gradient)], start=1):
        rows.append({"iteration": step, "lm loss": value, "grad_norm": 1.0, "learning_rate": step})
        halves = [("w", (4,), (0,), torch.tensor([g, 1.0])), ("w", (4,), (2,), torch.ones(2))]
        for rank, part in enumerate(halves):
            torch.save([part], folder / f"gradients_{step:04d}_{rank:04d}.pt")
    return Recording(parse_layout(name), folder, rows, padded_vocab_size=128)


def test_equal_runs_pass(tmp_path: Path) -> None:
    truth, mine = recording(tmp_path / "a", "dp1"), recording(tmp_path / "b", "tp2")
    result = compare(mine, truth, Tolerances())
    assert result.passed
    assert (result.loss and result.loss.size, result.gradient and result.gradient.size) == (0, 0)


def test_parts_of_ranks_make_the_full_gradient(tmp_path: Path) -> None:
    recording(tmp_path / "a", "dp1", gradient=5.0)
    assert read_gradients(tmp_path / "a", 2)["w"].tolist() == [5.0, 1.0, 1.0, 1.0]


def test_the_first_divergence_is_named(tmp_path: Path) -> None:
    truth = recording(tmp_path / "a", "dp1")
    mine = recording(tmp_path / "b", "tp2", loss=2.0002, gradient=1.5)
    result = compare(mine, truth, Tolerances())
    assert not result.passed
    assert result.loss is not None and result.loss.size == pytest.approx(1e-4, rel=1e-3)
    assert result.first is not None
    # 0.5 over the norm of four ones.
    assert (result.first.step, result.first.name) == (2, "w")
    assert result.first.size == pytest.approx(0.25)
    shown = io.StringIO()
    Console(width=200, file=shown).print(table([result], truth, Tolerances()))
    text = shown.getvalue()
    assert "FAIL" in text and "step 2: w (2.5e-01)" in text


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rows": []}, "0 steps instead of 2"),
        ({"failure": "a rank ended with exit code 1"}, "a rank ended with exit code 1"),
        ({"padded_vocab_size": 256}, "the vocabulary is padded to 256, not 128"),
    ],
)
def test_what_cannot_be_compared_fails(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    truth, mine = recording(tmp_path / "a", "dp1"), recording(tmp_path / "b", "tp2")
    values = {**vars(mine), **changes}
    result = compare(Recording(**values), truth, Tolerances())
    assert not result.passed
    assert result.problem is not None and problem in result.problem


def test_a_gradient_that_one_run_lacks_is_infinitely_far(tmp_path: Path) -> None:
    truth, mine = recording(tmp_path / "a", "dp1"), recording(tmp_path / "b", "tp2")
    torch.save([("v", (1,), (0,), torch.ones(1))], mine.folder / "gradients_0001_0005.pt")
    result = compare(mine, truth, Tolerances())
    assert result.first is not None
    assert (result.first.step, result.first.name, result.first.size) == (1, "v", math.inf)


def test_numbers_that_are_not_finite() -> None:
    assert relative(math.nan, math.nan) == 0
    assert relative(1.0, math.nan) == math.inf
    assert relative(0.0, 0.0) == 0
    assert gradient_difference(torch.tensor([math.nan]), torch.ones(1)) == math.inf
    assert gradient_difference(torch.zeros(2), torch.zeros(2)) == 0
    assert gradient_difference(torch.ones(2), torch.ones(3)) == math.inf
