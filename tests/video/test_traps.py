"""Traps of the published code (section 13 of the notes on it) that only a run can fall into."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.train.run import Run
from megatron_ext.video.data.randomness import draw_noise
from megatron_ext.video.model.mmdit.inputs import timestep_sinusoid
from megatron_ext.video.model.tokens import pack
from tests.video.clips import SHORT, steps, write_clips

SEED = 3


def _count_updates(run: Run) -> None:
    """Spoil the second step; demand one update of schedule and average in each of the others."""
    assert run.ema is not None and run.scheduler is not None
    calls: list[str] = []
    moved, updated, train = run.scheduler.step, run.ema.update, run.runner.train

    def spoil() -> None:
        if run.progress.iteration + 1 == 2:
            for parameter in run.chunks[0].parameters():
                parameter.main_grad.fill_(math.nan)

    def step(*arguments: Any, **named: Any) -> None:
        calls.append("schedule")
        moved(*arguments, **named)

    def update(iteration: int) -> None:
        calls.append("average")
        updated(iteration)

    def checked(*arguments: Any) -> Any:
        wanted = {0: [], 1: ["schedule", "average"], 2: ["schedule", "average"]}
        assert calls == wanted[run.progress.iteration]
        return train(*arguments)

    run.runner.observer = spoil
    run.scheduler.step = step
    run.ema.update = update  # type: ignore[method-assign]
    run.runner.train = checked  # type: ignore[method-assign]


def test_micro_batches_and_skipped_steps_move_nothing(clips: Path, tmp_path: Path) -> None:
    """Four micro-batches in each step."""
    rows = steps(clips, tmp_path, "--lr-warmup-iters 2", prepare=_count_updates)
    assert [row["skipped_iterations"] for row in rows] == [0, 1, 0]
    rates = [row["learning_rate"] for row in rows]
    assert rates[0] == rates[1] == pytest.approx(5e-4) and rates[2] == pytest.approx(1e-3)


def _check_path(named: dict[str, Any], velocity: torch.Tensor, samples: range) -> None:
    """``x_t + (1 - t) v`` is the noise, ``(1 - sigma_min) x1 - v`` the data that bf16 holds."""
    noise = pack(draw_noise(SEED, samples, (4, 3, 8, 8)), 2).double()
    t = named["timesteps"].double()[:, None, None]
    torch.testing.assert_close(named["img"].double() + (1 - t) * velocity, noise, rtol=0, atol=2e-6)
    data = (1 - 1e-5) * noise - velocity
    torch.testing.assert_close(data, data.bfloat16().double(), rtol=0, atol=2e-6)


def _check_types(run: Run) -> None:
    """Times, points and velocities are float32 up to the network, which gets all inputs."""
    model: Any = run.chunks[0].module.module
    seen: list[dict[str, Any]] = []
    model.register_forward_pre_hook(
        lambda module, positional, named: seen.append(named), with_kwargs=True
    )
    embedded: list[torch.Tensor] = []
    model.embedding.time_in.register_forward_pre_hook(lambda module, args: embedded.append(args[0]))
    next_step, train = run.train_source.next_step, run.runner.train
    batches: list[Any] = []

    def kept(num_microbatches: int) -> Any:
        batches[:] = next_step(num_microbatches)
        return batches

    def checked(*arguments: Any) -> Any:
        result = train(*arguments)
        assert len(seen) == len(embedded) == len(batches) == 4
        samples = range(8 * run.progress.iteration, 8 * run.progress.iteration + 2)
        for named, sinusoid, batch in zip(seen, embedded, batches, strict=True):
            for exact in (named["timesteps"], named["img"], batch.targets.velocity):
                assert exact.dtype is torch.float32
                assert not torch.equal(exact, exact.bfloat16().float())
            # Rounded to bfloat16 before, the angles would be wrong by up to 2.
            wanted = timestep_sinusoid(named["timesteps"].double())
            torch.testing.assert_close(sinusoid, wanted, rtol=0, atol=1e-3, check_dtype=False)
            assert named["guidance"].tolist() == [2.5, 2.5]
            _check_path(named, batch.targets.velocity, samples)
            samples = range(samples.stop, samples.stop + 2)
        seen.clear()
        embedded.clear()
        return result

    run.train_source.next_step = kept  # type: ignore[method-assign]
    run.runner.train = checked  # type: ignore[method-assign]


def test_a_16_bit_run_keeps_times_and_gives_its_model_everything(
    tmp_path: Path,
) -> None:
    data = write_clips(tmp_path / "clips", {SHORT: 8}, storage="bfloat16")
    words = f"--bf16 --train-iters 2 --guidance-embed --guidance 2.5 --seed {SEED}"
    rows = steps(data, tmp_path / "run", words, prepare=_check_types)
    assert all(1 < row["loss"] < 4 for row in rows)
