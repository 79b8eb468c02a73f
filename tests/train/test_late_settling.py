"""A host that learns late of the updates that its device decides on counts the same.

Here the device is a CPU with the fused kernel of a GPU. The truth is a run in which the host asks
after each step.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.optim.builder import choose_kernels
from megatron_ext.train.metrics import IntervalMetrics
from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.ranks import ParallelContext, ranks
from tests.runs_from_inside import build, one_step
from tests.training_runs import TINY, mock_data, train_on_ranks

SMALL = [
    *TINY,
    *mock_data(),
    *"--vocab-size 200 --num-layers 2 --hidden-size 32 --ffn-hidden-size 64".split(),
    *"--seq-length 16 --train-iters 7 --lr-warmup-iters 4 --log-interval 3".split(),
    *"--ema-decay 0.8 --ema-start 2 --eval-iters 1 --eval-interval 5".split(),
]
BAD = (2, 5, 6)
TIMED = ("seconds", "per_second", "tflops", "mfu", "time", "throughput")


def _spoil(run: Run) -> None:
    """Let the gradients of some steps be NaN."""

    def spoil() -> None:
        if run.progress.iteration + 1 in BAD:
            for chunk in run.chunks:
                for parameter in chunk.parameters():
                    parameter.main_grad.fill_(math.nan)

    run.runner.observer = spoil


def _ask_at_once(run: Run) -> None:
    train = run.runner.train

    def train_and_ask(*arguments: Any) -> Any:
        result = train(*arguments)
        run.runner.settle()
        assert run.runner.settled
        return result

    run.runner.train = train_and_ask  # type: ignore[method-assign]


def _prepare(run: Run, *, late: bool) -> None:
    choose_kernels(run.optimizer, fused=True)  # type: ignore[arg-type]
    _spoil(run)
    if not late:
        _ask_at_once(run)


def _rows(folder: Path, words: str, num_ranks: int, *, late: bool) -> list[dict[str, Any]]:
    prepare = partial(_prepare, late=late)
    flags = [*SMALL, "--save-interval", "4", *words.split()]
    code, rows = train_on_ranks(flags, ranks=num_ranks, save=folder, prepare=prepare)
    assert code == 0
    return [{k: v for k, v in row.items() if not any(x in k for x in TIMED)} for row in rows]


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        pytest.param(1, "", marks=pytest.mark.slow),
        (2, "--bf16 --pipeline-model-parallel-size 2"),
    ],
)
def test_nothing_shows_that_the_host_learned_late(
    num_ranks: int, words: str, tmp_path: Path
) -> None:
    """Rates, skipped steps, losses and all tensors of checkpoints agree to the last digit."""
    found = {late: _rows(tmp_path / str(late), words, num_ranks, late=late) for late in (0, 1)}
    assert found[0] == found[1]
    skipped = [row["total_skipped_iterations"] for row in found[1] if row["kind"] == "train"]
    assert skipped == [0, 1, 3]
    for step in (4, 7):
        tensors = [
            whole_tensors(tmp_path / str(late) / f"iter_{step:07d}", tmp_path / f"{late}.pt")
            for late in (0, 1)
        ]
        assert tensors[0].keys() == tensors[1].keys()
        for name, tensor in tensors[0].items():
            assert torch.equal(tensor, tensors[1][name]), name


@ranks()
def test_the_rate_of_each_step_counts_the_updates_before_it(context: ParallelContext) -> None:
    run = build(SMALL, context)
    optimizer = run.optimizer
    assert optimizer is not None
    choose_kernels(optimizer, fused=True)
    _spoil(run)
    window = IntervalMetrics(run)
    rates = []
    step_with_ready_grads = optimizer.step_with_ready_grads

    def noted() -> bool:
        rates.append(optimizer.param_groups[0]["lr"])
        return bool(step_with_ready_grads())

    optimizer.step_with_ready_grads = noted  # type: ignore[method-assign]
    for step in range(7):
        one_step(run, window)
        assert not run.runner.settled
        assert run.progress.iteration == step + 1
    # The warm-up of four updates: a skipped step leaves the rate to the next one.
    updates = [sum(bad not in BAD for bad in range(1, step)) for step in range(1, 8)]
    assert rates == pytest.approx([1e-3 * min(n, 4) / 4 for n in updates])
    assert run.progress.skipped_iterations == 3
    window.settle()
    assert run.runner.settled
