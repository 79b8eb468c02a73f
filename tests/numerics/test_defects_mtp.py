"""Defects of megatron-core's multi-token prediction (docs/numerics.md), and what we do instead."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
)
from torch import Tensor

from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch
from megatron_ext.device import select
from megatron_ext.losses.contract import StepCounts
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.step import gpt_forward_step
from megatron_ext.train.launch import fork_ranks
from megatron_ext.train.main import pretrain
from megatron_ext.train.preflight import preflight
from megatron_ext.train.task import Task
from megatron_ext.train.totals import mean_of
from pretrain_gpt import GPT
from tests.numerics.stock import (
    LENGTH,
    SEQUENCES,
    STOCK,
    cross_entropy,
    gpt_chunk,
    gpt_config,
    gradients,
    ragged_masks,
    rows,
    stock_chunk,
    whole_batch,
    worst,
)
from tests.ranks import ranks
from tests.training_runs import TINY, mock_data, train_on_ranks, training_rows

DEPTHS = ("--mtp-num-layers", "2")
ONLY_MTP = "mtp.layers"


def step_counts(batch: Batch) -> StepCounts:
    targets = batch.loss_weights.sum()
    return StepCounts(targets, targets, torch.stack([m.sum() for m in batch.mtp_loss_weights]), 1)


def our_gradients(
    run: RunConfig, context: ParallelContext, batch: Batch, micro_batch: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Of one step in micro-batches, as the step divides them; and what it logs."""
    chunk = gpt_chunk(run, context)
    counts = step_counts(batch)
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
    """What megatron-core's schedule divides multi-token-prediction losses by."""
    return 1 if run.training.calculate_per_token_loss else num_microbatches


def stock_gradients(
    run: RunConfig, context: ParallelContext, batch: Batch, micro_batch: int
) -> tuple[dict[str, Tensor], list[float]]:
    """The same step of megatron-core's GPTModel; its log is the mean over micro-batches."""
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


def truth(
    run: RunConfig, context: ParallelContext, batch: Batch
) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients of the objective written down as a formula, and the mean loss of each depth.

    mean of the main losses + c / K * sum over k of the mean of depth k's losses, each over its
    own targets in the whole global batch.
    """
    chunk = gpt_chunk(run, context)
    decoder_input, rotary = chunk._preprocess(batch.tokens, batch.position_ids)[:2]
    hidden = chunk.decoder(decoder_input, None, rotary_pos_emb=rotary)
    chunks = chunk.mtp(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        hidden_states=hidden,
        attention_mask=None,
        rotary_pos_emb=rotary,
        embedding=chunk.embedding,
    )
    parts = torch.chunk(chunks, 1 + len(batch.mtp_labels), dim=0)
    means = []
    labels = (batch.labels, *batch.mtp_labels)
    masks = (batch.loss_weights, *batch.mtp_loss_weights)
    for part, label, mask in zip(parts, labels, masks, strict=True):
        losses = cross_entropy(chunk.output_layer(part)[0], label)
        means.append((losses * mask).sum() / mask.sum())
    weight = run.model.mtp_loss_scaling_factor / len(batch.mtp_labels)
    (means[0] + weight * sum(means[1:])).backward()
    return gradients(chunk), [float(mean.detach()) for mean in means[1:]]


@pytest.mark.parametrize("full", [True, False])
@ranks()
def test_d05_each_depth_is_averaged_over_its_own_targets(
    context: ParallelContext, full: bool
) -> None:
    run = gpt_config(*DEPTHS)
    batch = whole_batch(run, None if full else ragged_masks())
    want, losses = truth(run, context, batch)
    for micro_batch in (1, 4):
        mine, logs = our_gradients(run, context, batch, micro_batch)
        assert worst(mine, want) <= 1e-5
        assert [logs["mtp_1 loss"], logs["mtp_2 loss"]] == pytest.approx(losses, rel=1e-6)


@ranks()
def test_d05_stock_weighs_a_depth_by_the_share_of_targets_that_it_keeps(
    context: ParallelContext,
) -> None:
    """With one depth and full masks, 31 of 32: a shift loses one target of each sequence."""
    run = gpt_config("--mtp-num-layers", "1")
    batch = whole_batch(run)
    want, _ = truth(run, context, batch)
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
def test_d14_the_logged_loss_does_not_depend_on_the_micro_batch_size(
    context: ParallelContext,
) -> None:
    run = gpt_config(*DEPTHS)
    batch = whole_batch(run, ragged_masks())
    _, losses = truth(run, context, batch)
    stock = {}
    for micro_batch in (1, 4):
        _, logs = our_gradients(run, context, batch, micro_batch)
        assert [logs["mtp_1 loss"], logs["mtp_2 loss"]] == pytest.approx(losses, rel=1e-6)
        _, stock[micro_batch] = stock_gradients(run, context, batch, micro_batch)
    assert stock[4] == pytest.approx(losses, rel=1e-5)
    assert abs(stock[1][0] / losses[0] - 1) > 1e-2


@pytest.mark.slow
def test_d14_runs_log_the_same_on_every_layout(tmp_path: Path) -> None:
    flags = [*TINY, *mock_data(), *DEPTHS, "--eod-mask-loss"]
    checkpoint = tmp_path / "checkpoint"
    assert train_on_ranks([*flags, "--train-iters", "1"], save=checkpoint)[0] == 0
    flags += ["--train-iters", "2", "--load", str(checkpoint), "--finetune"]
    layouts = {
        "mbs 2": (1, ""),
        "mbs 8": (1, "--micro-batch-size 8"),
        "cp": (2, "--context-parallel-size 2"),
        "dp": (2, ""),
        "pp": (2, "--pipeline-model-parallel-size 2"),
    }
    logged = {}
    for name, (count, words) in layouts.items():
        code, run = train_on_ranks([*flags, *words.split()], ranks=count, save=tmp_path / name)
        assert code == 0
        keys = ("mtp_1 loss", "mtp_2 loss", "lm loss", "grad_norm")
        logged[name] = [row[key] for row in training_rows(run) for key in keys]
    for name, values in logged.items():
        assert values == pytest.approx(logged["mbs 2"], rel=1e-6), name


def train_with_invariants(task: Task, save: Path) -> int:
    """Two stages, the embedding at ten times the learning rate; the exit code."""
    words = "--mtp-num-layers 1 --decoupled-lr 1e-2 --check-invariants 1 --train-iters 3".split()
    words += f"--pipeline-model-parallel-size 2 --nproc-per-node 2 --save {save}".split()
    device = select()
    config, tokenizer = preflight(
        parse_args([*TINY, *mock_data(), *words], world_size=0, device=device.kind).config
    )
    return fork_ranks(partial(pretrain, task, config, device=device, tokenizer=tokenizer), 2)


def test_d06_a_decoupled_learning_rate_leaves_the_copies_of_the_embedding_equal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Core marks the first stage's copy alone as an embedding, and the copies part."""
    assert train_with_invariants(GPT, tmp_path / "ours") == 0
    assert train_with_invariants(STOCK, tmp_path / "stock") != 0
    assert "tied embedding` differs between pipeline stages: ranks [1]" in capfd.readouterr().err
