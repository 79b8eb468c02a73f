"""Steps of video runs: updates, rates, precision, logs, validation, and what they ask for."""

import contextlib
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.parser import parse_args
from megatron_ext.optim.builder import choose_kernels
from megatron_ext.optim.schedule import build_scheduler
from megatron_ext.train.run import Run
from megatron_ext.video.data.randomness import draw_noise
from megatron_ext.video.model.joint_chunk import timestep_sinusoid
from megatron_ext.video.model.tokens import pack
from megatron_ext.video.task import VIDEO
from tests.host_syncs import READ, record_steps
from tests.stream_stand_in import stream_order
from tests.video.clips import SHORT, steps, write_clips

BETAS, EPS, DECAY, LR = (0.9, 0.95), 1e-15, 0.01, 1e-3
FACTORS = (20.0, 0.05, 1.0)
"""Factors on the gradients of the steps: beyond the largest norm, far below it, unchanged."""


def compare_with_torch(run: Run) -> None:
    """Let torch's AdamW follow the run, on the gradients that the run has before it clips them."""
    parameters = [p for chunk in run.chunks for p in chunk.parameters()]
    reference = [p.detach().clone().requires_grad_() for p in parameters]
    groups = [
        {"params": [p for p in reference if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in reference if p.dim() <= 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
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
    total = torch.zeros((), dtype=torch.float64)
    for part in getattr(run.optimizer, "chained_optimizers", [run.optimizer]):
        for state in part.optimizer.state.values():
            total += state["exp_avg"].double().square().sum()
    torch.distributed.all_reduce(total)
    return math.sqrt(float(total))


def test_steps_are_those_of_adamw(clips: Path, tmp_path: Path) -> None:
    """Shard them over two ranks, with the defaults of video runs; the log shows the whole norm."""
    words = "--lr-warmup-iters 0 --use-distributed-optimizer"
    rows = steps(clips, tmp_path, words, ranks=2, prepare=compare_with_torch)
    norms = [row["grad_norm"] for row in rows]
    assert norms[0] > 10 and norms[1] < 0.2 and 0.2 < norms[2] < 10
    assert [row["train/grad_norm"] for row in rows] == norms


def test_rates_are_the_usual_ones_and_those_of_the_published_code() -> None:
    """Follow ``1e-6 + (k + 1) / (W + 1) * (lr - 1e-6)``, whose first rate is the flag's start."""
    lr, warmup = 5e-5, 100
    start = 1e-6 + (lr - 1e-6) / (warmup + 1)
    words = f"--lr {lr} --lr-warmup-iters {warmup} --lr-warmup-init {start!r} --train-iters 300"
    at = [0, 1, warmup // 2, warmup]
    want = [1e-6 + (k + 1) / (warmup + 1) * (lr - 1e-6) for k in at]
    assert rates(words, [*at, 250]) == pytest.approx([*want, lr], rel=1e-9)
    # Its shipped configurations have no warm-up.
    constant = f"--lr {lr} --lr-warmup-iters 0 --train-iters 300"
    assert rates(constant, [0, 299]) == [lr, lr]
    # Ours rises for 1000 steps and stays.
    found = rates("--train-iters 3000", [0, 1, 500, 999, 1000, 1001, 2500, 2999])
    assert found == pytest.approx([0, 1e-7, 5e-5, 9.99e-5, *[1e-4] * 4], rel=1e-9)


SEED = 3


def _count_updates(run: Run) -> None:
    """Spoil the second step; demand one update of schedule and average in each of the others."""
    assert run.ema is not None and run.scheduler is not None
    calls: list[str] = []
    train = run.runner.train

    def spoil() -> None:
        if run.progress.iteration + 1 == 2:
            for parameter in run.chunks[0].parameters():
                parameter.main_grad.fill_(math.nan)

    def noted(name: str, do: Callable[..., Any]) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            calls.append(name)
            return do(*args, **named)

        return call

    def checked(*arguments: Any) -> Any:
        wanted = {0: [], 1: ["schedule", "average"], 2: ["schedule", "average"]}
        assert calls == wanted[run.progress.iteration]
        return train(*arguments)

    run.runner.observer = spoil
    run.scheduler.step = noted("schedule", run.scheduler.step)
    run.ema.update = noted("average", run.ema.update)  # type: ignore[method-assign]
    run.runner.train = checked  # type: ignore[method-assign]


def test_micro_batches_and_skipped_steps_move_nothing(clips: Path, tmp_path: Path) -> None:
    rows = steps(clips, tmp_path, "--lr-warmup-iters 2", prepare=_count_updates)
    assert [row["skipped_iterations"] for row in rows] == [0, 1, 0]
    rates = [row["learning_rate"] for row in rows]
    assert rates[0] == rates[1] == pytest.approx(5e-4) and rates[2] == pytest.approx(1e-3)


def _check_path(named: dict[str, Any], velocity: torch.Tensor, samples: range) -> None:
    """Check that ``x_t + (1 - t) v`` is the noise, ``(1 - sigma_min) x1 - v`` the bf16 data."""
    noise = pack(draw_noise(SEED, samples, (4, 3, 8, 8)), 2).double()
    t = named["timesteps"].double()[:, None, None]
    torch.testing.assert_close(named["img"].double() + (1 - t) * velocity, noise, rtol=0, atol=2e-6)
    data = (1 - 1e-5) * noise - velocity
    torch.testing.assert_close(data, data.bfloat16().double(), rtol=0, atol=2e-6)


def _check_types(run: Run) -> None:
    """Check that the network gets all inputs, with times, points and velocities in float32."""
    model: Any = run.chunks[0].module.module
    seen: list[dict[str, Any]] = []
    model.register_forward_pre_hook(lambda *given: seen.append(given[2]), with_kwargs=True)
    embedded: list[torch.Tensor] = []
    model.embedding.time_in.register_forward_pre_hook(lambda module, args: embedded.append(args[0]))
    next_step, train = run.train_source.next_step, run.runner.train
    batches: list[Any] = []

    def kept(num_microbatches: int, seq_length: int | None) -> Any:
        batches[:] = next_step(num_microbatches, seq_length)
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


def test_a_16_bit_run_keeps_times_and_gives_its_model_everything(tmp_path: Path) -> None:
    data = write_clips(tmp_path / "clips", {SHORT: 8}, storage="bfloat16")
    words = f"--bf16 --train-iters 2 --guidance-embed --guidance 2.5 --seed {SEED}"
    rows = steps(data, tmp_path / "run", words, prepare=_check_types)
    assert all(1 < row["loss"] < 4 for row in rows)


def test_a_step_asks_for_the_update_before_it_alone(clips: Path, tmp_path: Path) -> None:
    note = tmp_path / "places.json"
    words = "--bf16 --ema-decay 0.9"
    steps(clips, tmp_path, f"{words} --log-interval 9", prepare=partial(record_steps, path=note))
    assert json.loads(note.read_text()) == [READ]


def follow(run: Run, folder: Path) -> None:
    """Check the order of all that a run does on the GPU's streams; note what its steps did."""
    run.train_source._device = torch.device("cuda", 0)  # type: ignore[attr-defined]
    choose_kernels(run.optimizer, fused=True)  # type: ignore[arg-type]
    run.runner.scales_in_update = True
    run.until_the_process_ends = contextlib.ExitStack()  # type: ignore[attr-defined]
    order = run.until_the_process_ends.enter_context(stream_order())  # type: ignore[attr-defined]
    waits = list[str]()

    def followed(work: Callable[..., Any], *arguments: Any) -> Any:
        order.waits.clear()  # entries of the log may wait
        result = work(*arguments)
        waits.extend(order.waits)
        noted = {"operations": order.default.clock[order.default], "waits": waits}
        noted["copies"] = sum(s.clock.get(s, 0) for s in order.streams if s is not order.default)
        (folder / f"{run.context.rank}.json").write_text(json.dumps(noted))
        return result

    run.runner.train = partial(followed, run.runner.train)  # type: ignore[method-assign]
    source: Any = run.train_source
    source.next_step = partial(followed, source.next_step)


@pytest.mark.slow
def test_steps_wait_for_what_they_use(clips: Path, tmp_path: Path) -> None:
    """The clips of both ranks' steps and their noise are sent ahead, on a stream of copies."""
    words = "--bf16 --log-interval 9 --tensor-model-parallel-size 2 --sequence-parallel"
    steps(clips, tmp_path, words, ranks=2, prepare=partial(follow, folder=tmp_path))
    for rank in range(2):
        noted = json.loads((tmp_path / f"{rank}.json").read_text())
        assert noted["operations"] > 3 * 500
        assert noted["copies"] > 3 * 4
        # The log has read the first step's update before.
        assert noted["waits"] == [READ]


def rates(words: str, at: list[int]) -> list[float]:
    flags = f"--video-data-path unread --micro-batch-size 2 --global-batch-size 6 {words}".split()
    config = parse_args(flags, VIDEO, world_size=1, device="cpu").config
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    scheduler = build_scheduler(config, optimizer)  # type: ignore[arg-type]
    found = []
    for _ in range(max(at) + 1):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=6)
    return [found[step] for step in at]
