"""Operations are counted as they are made."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext.train.run import Run
from tests.video.streaming.runs import run, runner_of


def _record(run: Run, path: Path) -> None:
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
    """All passes, also of the sequences that begin and of those that switch."""
    record = partial(_record, path=tmp_path / "seen.pt")
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
        record = partial(_record, path=tmp_path / f"{ranks}.pt")
        sizes = {"ranks": ranks, "batch": 2, "micro": 2 // ranks}
        run(tmp_path, "--train-iters 2", save=str(ranks), prepare=record, **sizes)
    (one, _), (two, _) = (torch.load(tmp_path / f"{ranks}.pt") for ranks in (1, 2))
    assert [ours for _, ours in one] == [ours for _, ours in two]
