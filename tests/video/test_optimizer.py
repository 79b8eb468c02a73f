"""Updates and learning rates of video runs against plain torch and the published formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.parser import parse_args
from megatron_ext.optim.builder import build_scheduler
from megatron_ext.train.run import Run
from megatron_ext.video.config.rules import VIDEO_DEFAULTS
from tests.video.clips import steps

BETAS, EPS, DECAY, LR = (0.9, 0.95), 1e-15, 0.01, 1e-3
FACTORS = (20.0, 0.05, 1.0)
"""Of the gradients of the steps: beyond the largest norm, far below it, and as they are."""


def compare_with_torch(run: Run) -> None:
    """Let torch's AdamW follow the run, on the gradients that the run has before it clips them."""
    parameters = [p for chunk in run.chunks for p in chunk.parameters()]
    reference = [p.detach().clone().requires_grad_() for p in parameters]
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in reference if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in reference if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=BETAS,
        eps=EPS,
    )
    grads: list[Tensor] = []
    train = run.runner.train

    def scale() -> None:
        for parameter in parameters:
            parameter.main_grad.mul_(FACTORS[run.progress.iteration])
        grads[:] = [parameter.main_grad.clone() for parameter in parameters]

    def checked(*arguments: Any) -> Any:
        result = train(*arguments)
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
        assert math.isclose(result.update.grad_norm, norm, rel_tol=1e-6)
        assert (norm > 1) == (FACTORS[run.progress.iteration] > 1)
        for parameter, grad in zip(reference, grads, strict=True):
            parameter.grad = grad * min(1.0, 1.0 / norm)
        plain.step()
        for mine, want in zip(parameters, reference, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-6)
        if run.progress.iteration == 0:
            assert math.isclose(first_moment_norm(run) / (1 - BETAS[0]), 1.0, rel_tol=1e-5)
        return result

    run.runner.observer = scale
    run.runner.train = checked  # type: ignore[method-assign]


def first_moment_norm(run: Run) -> float:
    """Of all ranks' shards together."""
    total = torch.zeros((), dtype=torch.float64)
    for part in getattr(run.optimizer, "chained_optimizers", [run.optimizer]):
        for state in part.optimizer.state.values():
            total += state["exp_avg"].double().square().sum()
    torch.distributed.all_reduce(total)
    return math.sqrt(float(total))


def test_steps_are_those_of_adamw(clips: Path, tmp_path: Path) -> None:
    """Sharded over two ranks, with the defaults of video runs; the log shows the whole norm."""
    words = "--lr-warmup-iters 0 --use-distributed-optimizer"
    rows = steps(clips, tmp_path, words, ranks=2, prepare=compare_with_torch)
    norms = [row["grad_norm"] for row in rows]
    assert norms[0] > 10 and norms[1] < 0.2 and 0.2 < norms[2] < 10
    assert [row["train/grad_norm"] for row in rows] == norms


def rates(words: str, at: list[int]) -> list[float]:
    """Learning rates of training steps, counted from 0."""
    flags = f"--video-data-path unread --micro-batch-size 2 --global-batch-size 6 {words}".split()
    config = parse_args(flags, world_size=1, device="cpu", defaults=VIDEO_DEFAULTS).config
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    scheduler = build_scheduler(config.optimizer, config.training, optimizer)  # type: ignore[arg-type]
    found = {}
    for step in range(max(at) + 1):
        found[step] = optimizer.param_groups[0]["lr"]
        scheduler.step(increment=6)
    return [found[step] for step in at]


def test_the_rate_rises_for_1000_steps_and_stays() -> None:
    found = rates("--train-iters 3000", [0, 1, 500, 999, 1000, 1001, 2500, 2999])
    want = [0, 1e-7, 5e-5, 9.99e-5, 1e-4, 1e-4, 1e-4, 1e-4]
    assert found == pytest.approx(want, rel=1e-9)


def test_the_rate_of_the_published_code() -> None:
    """``1e-6 + (k + 1) / (W + 1) * (lr - 1e-6)``: its first rate is the flag's start."""
    lr, warmup = 5e-5, 100
    start = 1e-6 + (lr - 1e-6) / (warmup + 1)
    words = f"--lr {lr} --lr-warmup-iters {warmup} --lr-warmup-init {start!r} --train-iters 300"
    at = [0, 1, warmup // 2, warmup]
    want = [1e-6 + (k + 1) / (warmup + 1) * (lr - 1e-6) for k in at]
    assert rates(words, [*at, 250]) == pytest.approx([*want, lr], rel=1e-9)
    # Its shipped configurations have no warm-up.
    constant = f"--lr {lr} --lr-warmup-iters 0 --train-iters 300"
    assert rates(constant, [0, 299]) == [lr, lr]
