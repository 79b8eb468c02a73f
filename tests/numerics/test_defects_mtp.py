"""Defects of megatron-core's multi-token prediction (docs/numerics.md), and what we do instead."""

import math
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch
from megatron_ext.extras.audit import reproduce_mtp as stock
from megatron_ext.extras.audit import reproduce_stages as stages
from megatron_ext.extras.audit.reproduced import Reproduced
from megatron_ext.losses.contract import StepCounts
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.step import gpt_forward_step
from megatron_ext.train.step import mean_of
from tests.numerics.reproductions import check_ratio
from tests.numerics.stock import (
    LENGTH,
    SEQUENCES,
    gpt_chunk,
    gpt_config,
    gradients,
    ragged_masks,
    rows,
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


def test_d05_stock_weighs_a_depth_by_the_targets_that_it_keeps() -> None:
    """A shift loses one target of each sequence: 57 of 61 are left, and in the shortest 2 of 3.

    The newer core gives the targets of a micro-batch the weight of those that it lost.
    """
    check_ratio(stock.weight_of_a_depth, {"0.16": 57 / 61, "0.19": 57 / 61 * 3 / 2})


def test_d05_stock_with_full_masks() -> None:
    def weight() -> Reproduced:
        return Reproduced(*stock.weight_of_a_target((32, 32), 0), 1.0, "full masks")

    check_ratio(weight, {"0.16": 31 / 32, "0.19": 1.0})


@pytest.mark.parametrize("mode", ["--calculate-per-token-loss", "--no-calculate-per-token-loss"])
@ranks()
def test_d04_a_batch_without_targets_leaves_numbers(context: ParallelContext, mode: str) -> None:
    run = gpt_config(*DEPTHS, mode)
    batch = whole_batch(run, torch.zeros(SEQUENCES, LENGTH))
    mine, logs = our_gradients(run, context, batch, 1)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in mine.values())
    assert logs == {"lm loss": 0.0, "mtp_1 loss": 0.0, "mtp_2 loss": 0.0}


def test_d04_stock_divides_by_no_targets() -> None:
    found = check_ratio(stock.no_targets, {"0.16": math.nan, "0.19": 1.0})
    logs = "nan, and nan" if math.isnan(found.stock) else "0, and 0"
    assert f"logged loss is {logs} per token" in found.what


@ranks()
def test_d14_the_logged_loss_does_not_depend_on_micro_batches(context: ParallelContext) -> None:
    run = gpt_config(*DEPTHS)
    batch = whole_batch(run, ragged_masks())
    ours = {}
    for micro_batch in (1, 4):
        _, logs = our_gradients(run, context, batch, micro_batch)
        ours[micro_batch] = [logs["mtp_1 loss"], logs["mtp_2 loss"]]
    assert ours[1] == pytest.approx(ours[4], rel=1e-6)


def test_d14_stock_logs_the_mean_of_the_means_of_micro_batches() -> None:
    found = check_ratio(stock.logged_loss, {"0.16": 0.99124, "0.19": 0.99124})
    assert f"with all of them in one {found.right:.4f}" in found.what


def test_d11_stock_recomputes_no_packed_samples() -> None:
    found = check_ratio(stock.recomputed_packing, {"0.16": math.nan, "0.19": 1.0}, rel=1e-6)
    assert math.isnan(found.stock) == ("TypeError (save_for_backward can only" in found.what)


def test_d12_stock_needs_labels() -> None:
    found = check_ratio(stock.no_labels, {"0.16": math.nan, "0.19": 1.0}, rel=1e-6)
    assert math.isnan(found.stock) == ("AttributeError" in found.what)


def test_d13_stock_counts_padding_in_a_depth() -> None:
    """The newer core hands the mask on, but counts the place that its shift fills."""
    check_ratio(stock.padding_of_a_depth, {"0.16": 32 / 19, "0.19": 20 / 19})


def train_with_invariants(words: str, save: Path) -> int:
    """Train with the embedding at ten times the learning rate, and return the exit code."""
    words += " --mtp-num-layers 1 --decoupled-lr 1e-2 --check-invariants 1 --train-iters 3"
    code, _ = train_on_ranks(
        [*TINY, *mock_data(), *words.split()], ranks=2 + ("layout" in words), save=save
    )
    return code


STAGES = "--pipeline-model-parallel-size"
OWN_STAGE = f"{STAGES} 3 --pipeline-model-parallel-layout Etttt|m|L"


@pytest.mark.parametrize("tie", ["", "--no-untie-embeddings-and-output-weights"])
@pytest.mark.parametrize("words", [f"{STAGES} 2", OWN_STAGE], ids=["last stage", "own stage"])
def test_d06_a_decoupled_learning_rate_leaves_the_copies_of_the_embedding_equal(
    words: str, tie: str, tmp_path: Path
) -> None:
    assert train_with_invariants(f"{words} {tie}", tmp_path) == 0


def test_d06_stock_marks_the_first_copy_alone_as_an_embedding() -> None:
    """The copies then learn at different rates, and part."""
    check_ratio(stages.decoupled_rate, {"0.16": 0.1, "0.19": 1.0})


def test_d07_stock_adds_the_gradient_of_another_weight() -> None:
    """Core's default embedding ranks leave out the own stage, and add the last stage to it."""
    found = check_ratio(stages.stage_of_its_own, {"0.16": 5 / 3, "0.19": 5 / 3})
    assert "the three have 5, 2, 5 of 7" in found.what


def test_d08_stock_leaves_learned_positions_apart() -> None:
    check_ratio(stages.learned_positions, {"0.16": 1 / 3, "0.19": 1 / 3})
