"""Micro-batches, ranks and whole steps without targets leave numbers everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_ext.config.parser import parse_args
from megatron_ext.data.batch import Batch
from megatron_ext.device import select
from megatron_ext.inspect.parity import parse_layout
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.train.launch import fork_ranks
from megatron_ext.train.main import pretrain
from megatron_ext.train.preflight import preflight
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from tests.training_runs import TINY, mock_data

FLAGS = [word for word in TINY if word != "--use-cpu-initialization"]
MODEL = (
    "--mtp-num-layers 2 --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-z-loss-coeff 0.001 --moe-token-dispatcher-type alltoall --train-iters 2"
)
LAYOUTS = ["dp1", "dp2", "cp2", "pp2", "tp2sp", "pp2zbh1cp2", "pp2[--no-calculate-per-token-loss]"]


def masked(batch: Batch) -> Batch:
    """Return the batch without any target, for the model and for the depths."""
    return replace(
        batch,
        loss_weights=torch.zeros_like(batch.loss_weights),
        mtp_loss_weights=tuple(torch.zeros_like(mask) for mask in batch.mtp_loss_weights),
    )


def train_masked(
    layout: str, choose: Callable[[Run, int], bool], check: Callable[[Run, StepResult], None]
) -> None:
    """Train a step; micro-batch i of a rank is masked where ``choose(run, i)`` says so."""
    named = parse_layout(layout)
    flags = [*FLAGS, *mock_data(), *MODEL.split(), *named.flags]
    flags = [*flags, "--nproc-per-node", str(named.ranks)]
    device = select()
    config, tokenizer = preflight(
        parse_args(flags, TEXT, world_size=0, device=device.kind).config, GPT.preflight
    )

    def prepare(run: Run) -> None:
        count = run.batch_size.num_microbatches
        batches = run.train_source.next_step(count)
        if batches is not None:
            batches = [masked(b) if choose(run, i) else b for i, b in enumerate(batches)]

        def gradients_are_numbers() -> None:
            for chunk in run.chunks:
                for name, parameter in chunk.named_parameters():
                    assert bool(torch.isfinite(parameter.main_grad).all()), name  # type: ignore[attr-defined]

        run.runner.observer = gradients_are_numbers
        result = run.runner.train(batches, count, 0, 16)
        for chunk in run.chunks:
            for name, parameter in chunk.named_parameters():
                assert bool(torch.isfinite(parameter).all()), name
        assert all(math.isfinite(float(loss)) for loss in result.losses.values())
        check(run, result)

    main = partial(pretrain, GPT, config, device=device, assets=tokenizer, prepare=prepare)
    assert fork_ranks(main, named.ranks) == 0


def trains(run: Run, result: StepResult) -> None:
    assert result.update.applied
    assert result.update.grad_norm > 0
    if run.context.is_last_stage:
        assert {"lm loss", "mtp_1 loss", "mtp_2 loss"} <= result.losses.keys()
        assert float(result.losses["lm loss"]) == pytest.approx(math.log(2000), rel=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_masked_micro_batch(layout: str) -> None:
    train_masked(layout, lambda run, i: i == 1, trains)


@pytest.mark.parametrize("layout", ["cp2", "cp2a2a", "pp2zbh1cp2"])
def test_a_masked_context_parallel_rank(layout: str) -> None:
    train_masked(layout, lambda run, i: run.context.cp_rank == 1, trains)


def test_a_masked_data_parallel_rank() -> None:
    train_masked("dp2", lambda run, i: run.context.dp_rank == 0, trains)


def learns_nothing(run: Run, result: StepResult) -> None:
    """Check that the gradient is exactly zero, the step counts as done, and the log says 0."""
    if run.config.training.calculate_per_token_loss:
        assert result.update.grad_norm == 0
        for chunk in run.chunks:
            assert not any(bool(p.main_grad.any()) for p in chunk.parameters())
    assert result.update.applied
    if run.context.is_last_stage:
        assert float(result.losses["lm loss"]) == 0
        assert float(result.losses["mtp_2 loss"]) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_masked_step(layout: str) -> None:
    train_masked(layout, lambda run, i: True, learns_nothing)


def test_a_run_goes_on_after_a_masked_step(tmp_path: Path) -> None:
    """Optimizer and schedule stay usable: the next step trains."""

    def train_again(run: Run, result: StepResult) -> None:
        learns_nothing(run, result)
        batches = run.train_source.next_step(run.batch_size.num_microbatches)
        trains(run, run.runner.train(batches, run.batch_size.num_microbatches, 16, 16))

    train_masked("pp2", lambda run, i: True, train_again)
