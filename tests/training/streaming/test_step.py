"""What the steps of a streaming run change, and what they must not."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.optim.update import parts_of
from megatron_ext.training.setup import Run
from megatron_ext.training.streaming.step import StreamingRunner
from tests.training.streaming.tiny import run

STEPS = 5
TRAINED = [True, False, True, False, True]


def _weights(module: Any) -> Tensor:
    (bare,) = unwrap_model([module])
    return torch.cat([p.detach().flatten().clone() for p in bare.parameters()])


def _record(run: Run, path: Path) -> None:
    """Write down the weights of all networks before and after each step, and the average."""
    runner = run.runner
    assert isinstance(runner, StreamingRunner) and run.ema is not None
    networks = {
        "generator": runner.generator.network,
        "critic": runner.critic.network,
        "teacher": runner.teacher,
    }
    seen: list[dict[str, Tensor]] = [{k: _weights(x) for k, x in networks.items()}]
    chunks: list[tuple[int, int, str]] = []
    content: dict[str, Any] = {
        "weights": seen,
        "chunks": chunks,
        "betas": [
            group["betas"]
            for network in (runner.generator, runner.critic)
            for part in parts_of(network.optimizer)
            for group in part.optimizer.param_groups
        ],
        "optimized": sum(
            p.numel()
            for network in (runner.generator, runner.critic)
            for part in parts_of(network.optimizer)
            for p in part.get_parameters()
        ),
        "buffers": [hasattr(p, "main_grad") for p in runner.teacher.parameters()],
    }
    train, next_chunk = runner.train, runner.sequence.next_chunk

    def recorded(*args: Any) -> Any:
        result = train(*args)
        seen.append({k: _weights(x) for k, x in networks.items()})
        torch.save(content, path)
        return result

    def noted(*, trains_generator: bool) -> Any:
        chunk = next_chunk(trains_generator=trains_generator)
        chunks.append((chunk.sequence, chunk.number, "g" if trains_generator else "c"))
        return chunk

    runner.train = recorded  # type: ignore[method-assign]
    runner.sequence.next_chunk = noted  # type: ignore[method-assign]


def test_criterion_20_the_generator_is_trained_in_one_of_so_many_steps(tmp_path: Path) -> None:
    rows = run(
        tmp_path, f"--train-iters {STEPS}", prepare=partial(_record, path=tmp_path / "seen.pt")
    )
    seen = torch.load(tmp_path / "seen.pt")
    pairs = list(zip(seen["weights"], seen["weights"][1:], strict=False))
    assert [not torch.equal(a["generator"], b["generator"]) for a, b in pairs] == TRAINED
    assert not any(torch.equal(a["critic"], b["critic"]) for a, b in pairs)
    assert set(seen["betas"]) == {(0.0, 0.999)}
    # The first step is reported once more in the second line, as in all runs.
    logged = ["train/generator loss" in row for row in rows]
    assert logged[:1] + logged[2:] == TRAINED[:1] + TRAINED[2:]
    for row in rows:
        assert math.isfinite(row["loss"]) and row["loss"] > 0 and row["grad_norm"] > 0
    kinds = "gc c gc c gc".replace(" ", "")
    assert seen["chunks"] == [(i // 4, i % 4, kind) for i, kind in enumerate(kinds)]
    # Criterion 13: frozen, without buffers, and in no optimizer.
    first, last = seen["weights"][0], seen["weights"][-1]
    assert torch.equal(first["teacher"], last["teacher"]) and not any(seen["buffers"])
    assert not torch.equal(first["teacher"], first["critic"])
    assert seen["optimized"] == first["generator"].numel() + first["critic"].numel()
