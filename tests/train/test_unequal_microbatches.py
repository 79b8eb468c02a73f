"""Unequal micro-batches weigh as much as one micro-batch of all their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.data.batch import Batch
from megatron_ext.train.run import Run
from tests.training_runs import TINY, mock_data, train_on_ranks

FLAGS = [*TINY, *mock_data(), *"--micro-batch-size 1 --global-batch-size 2 --train-iters 1".split()]
TARGETS = (8, 2)


def with_targets(batch: Batch, count: int) -> Batch:
    mask = torch.zeros_like(batch.loss_weights)
    mask[:, :count] = 1
    return replace(batch, loss_weights=mask)


def joined(batches: list[Batch]) -> Batch:
    names = ("tokens", "labels", "loss_weights", "position_ids")
    return Batch(*(torch.cat([getattr(batch, name) for batch in batches]) for name in names))


def gradient(run: Run, batches: list[Batch]) -> Tensor:
    """Return all gradients of a step in one vector."""
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    run.runner.forward_backward(batches, len(batches), forward_only=False)
    return torch.cat([p.main_grad.flatten() for chunk in run.chunks for p in chunk.parameters()])


def compare(words: list[str], save: Path, fits: Callable[[float], bool]) -> None:
    """Check the relative difference between the gradients of two micro-batches and of one."""

    def prepare(run: Run) -> None:
        drawn = run.train_source.next_step(2)
        assert drawn is not None
        apart = [with_targets(b, n) for b, n in zip(drawn, TARGETS, strict=True)]
        truth = gradient(run, [joined(apart)]).clone()
        assert fits(float((gradient(run, apart) - truth).norm() / truth.norm()))

    assert train_on_ranks([*FLAGS, *words], save=save, prepare=prepare)[0] == 0


@pytest.mark.parametrize("impl", ["chunked", "eager"])
def test_unequal_microbatches_equal_one(impl: str, tmp_path: Path) -> None:
    compare(["--cross-entropy-impl", impl], tmp_path, lambda error: error <= 1e-6)


def test_the_mean_of_means_depends_on_the_microbatches(tmp_path: Path) -> None:
    compare(["--no-calculate-per-token-loss"], tmp_path, lambda error: error > 0.1)
