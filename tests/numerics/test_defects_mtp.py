"""Defects of megatron-core's multi-token prediction (docs/numerics.md), and what we do instead."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch
from megatron_ext.losses.contract import StepCounts
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.step import gpt_forward_step
from megatron_ext.text.task import GPT
from megatron_ext.train.step import mean_of
from megatron_ext.train.task import Task
from tests.numerics.stock import (
    LENGTH,
    SEQUENCES,
    STOCK,
    gpt_chunk,
    gpt_config,
    gradients,
    ragged_masks,
    rows,
    stock_chunk,
    whole_batch,
)
from tests.ranks import ranks
from tests.training_runs import TINY, mock_data, train_on_ranks

DEPTHS = ("--mtp-num-layers", "2")
ONLY_MTP = "mtp.layers"


def our_gradients(
    run: RunConfig, context: ParallelContext, batch: Batch, micro_batch: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the gradients of one step in micro-batches, as the step divides them, and its log."""
    chunk = gpt_chunk(run, context)
    targets, of_depths = batch.loss_weights.sum(), [m.sum() for m in batch.mtp_loss_weights]
    counts = StepCounts(targets, targets, torch.stack(of_depths), 1)
    pieces = range(0, SEQUENCES, micro_batch)
    totals: dict[str, Tensor] = {}
    MTPLossAutoScaler.set_loss_scale(torch.ones(1) / scale_of_means(run, len(pieces)))
    for first in pieces:
        output, loss = gpt_forward_step(run, rows(batch, first, micro_batch), chunk, counts)
        total, count, report = loss(output)
        if run.training.calculate_per_token_loss:
            total.backward()
        else:
            (total / count.clamp(min=1) / len(pieces)).backward()
        for key, entry in report.items():
            totals[key] = totals.get(key, torch.zeros(2)) + entry
    divisor = max(float(counts.main), 1.0) if run.training.calculate_per_token_loss else 1.0
    logs = {key: float(mean_of(entry)) for key, entry in totals.items()}
    return {name: grad / divisor for name, grad in gradients(chunk).items()}, logs


def scale_of_means(run: RunConfig, num_microbatches: int) -> int:
    """Return what megatron-core's schedule divides multi-token-prediction losses by."""
    return 1 if run.training.calculate_per_token_loss else num_microbatches


def stock_gradients(
    run: RunConfig, context: ParallelContext, batch: Batch, micro_batch: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Take the same step with megatron-core's GPTModel, whose log is a mean of micro-batches."""
    chunk = gpt_chunk(run, context, stock_chunk)
    pieces = range(0, SEQUENCES, micro_batch)
    MTPLossLoggingHelper.tracker.clear()
    MTPLossAutoScaler.set_loss_scale(torch.ones(1) / scale_of_means(run, len(pieces)))
    for first in pieces:
        part = rows(batch, first, micro_batch)
        losses = chunk(
            part.tokens, part.position_ids, None, labels=part.labels, loss_mask=part.loss_weights
        )
        total = (losses * part.loss_weights).sum()
        if not run.training.calculate_per_token_loss:
            total = total / part.loss_weights.sum().clamp(min=1) / len(pieces)
        total.backward()
    per_token = run.training.calculate_per_token_loss
    divisor = max(float(batch.loss_weights.sum()), 1.0) if per_token else 1.0
    log = (MTPLossLoggingHelper.tracker["values"] / len(pieces)).tolist()
    return {name: grad / divisor for name, grad in gradients(chunk).items()}, log


@ranks()
def test_d05_stock_weighs_a_depth_by_the_targets_that_it_keeps(context: ParallelContext) -> None:
    """One depth with full masks keeps 31 of 32: a shift loses one target of each sequence."""
    run = gpt_config("--mtp-num-layers", "1")
    batch = whole_batch(run)
    want, _ = our_gradients(run, context, batch, 1)
    stock, _ = stock_gradients(run, context, batch, 1)
    name = f"{ONLY_MTP}.0.eh_proj.weight"
    ratio = float((stock[name] * want[name]).sum() / want[name].square().sum())
    assert ratio == pytest.approx((LENGTH - 1) / LENGTH, rel=1e-5)


@pytest.mark.parametrize("mode", ["--calculate-per-token-loss", "--no-calculate-per-token-loss"])
@ranks()
def test_d04_a_batch_without_targets_leaves_numbers(context: ParallelContext, mode: str) -> None:
    run = gpt_config(*DEPTHS, mode)
    batch = whole_batch(run, torch.zeros(SEQUENCES, LENGTH))
    mine, logs = our_gradients(run, context, batch, 1)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in mine.values())
    assert logs == {"lm loss": 0.0, "mtp_1 loss": 0.0, "mtp_2 loss": 0.0}
    stock, log = stock_gradients(run, context, batch, 1)
    assert all(math.isnan(x) for x in log)
    spoilt = any(bool(grad.isnan().any()) for grad in stock.values())
    assert spoilt == (not run.training.calculate_per_token_loss)


@ranks()
def test_d14_the_logged_loss_does_not_depend_on_micro_batches(context: ParallelContext) -> None:
    run = gpt_config(*DEPTHS)
    batch = whole_batch(run, ragged_masks())
    ours, stock = {}, {}
    for micro_batch in (1, 4):
        _, logs = our_gradients(run, context, batch, micro_batch)
        ours[micro_batch] = [logs["mtp_1 loss"], logs["mtp_2 loss"]]
        _, stock[micro_batch] = stock_gradients(run, context, batch, micro_batch)
    assert ours[1] == pytest.approx(ours[4], rel=1e-6)
    assert stock[4] == pytest.approx(ours[4], rel=1e-5)
    assert abs(stock[1][0] / ours[1][0] - 1) > 1e-2


def train_with_invariants(task: Task, words: str, save: Path) -> int:
    """Train with the embedding at ten times the learning rate, and return the exit code."""
    words += " --mtp-num-layers 1 --decoupled-lr 1e-2 --check-invariants 1 --train-iters 3"
    code, _ = train_on_ranks(
        [*TINY, *mock_data(), *words.split()], ranks=2 + ("layout" in words), save=save, task=task
    )
    return code


STAGES = "--pipeline-model-parallel-size"
OWN_STAGE = f"{STAGES} 3 --pipeline-model-parallel-layout Etttt|m|L"


@pytest.mark.parametrize("tie", ["", "--no-untie-embeddings-and-output-weights"])
@pytest.mark.parametrize("words", [f"{STAGES} 2", OWN_STAGE], ids=["last stage", "own stage"])
def test_d06_a_decoupled_learning_rate_leaves_the_copies_of_the_embedding_equal(
    words: str, tie: str, tmp_path: Path
) -> None:
    assert train_with_invariants(GPT, f"{words} {tie}", tmp_path) == 0


def test_d06_stock_marks_the_first_copy_alone_as_an_embedding(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The copies then learn at different rates, and part."""
    stock = replace(STOCK, takes_step_flags=True)
    assert train_with_invariants(stock, f"{STAGES} 2", tmp_path) != 0
    assert "tied embedding` differs between pipeline stages: ranks [1]" in capfd.readouterr().err
