"""Builds a run of pretrain_gpt.py within a test, to look at it from inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.config.parser import parse_args
from megatron_ext.data.batch import Batch
from megatron_ext.device import select
from megatron_ext.parallel.context import ParallelContext, seed_everything
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.train.callbacks.averaging import WeightAverage
from megatron_ext.train.metrics import IntervalMetrics
from megatron_ext.train.preflight import preflight
from megatron_ext.train.run import Run
from megatron_ext.train.setup import build_run


def build(flags: Sequence[str], context: ParallelContext) -> Run:
    """Build the run on this rank."""
    kind = select().kind
    parsed = parse_args(list(flags), TEXT, world_size=context.layout.world_size, device=kind)
    config, tokenizer = preflight(parsed.config, GPT.preflight)
    seed_everything(context, config.training.seed)
    return build_run(config, GPT, context, torch.device(kind), tokenizer)


def one_step(run: Run, metrics: IntervalMetrics, batches: list[Batch] | None = None) -> None:
    """Take a step as the loop does, with batches that may have been read before."""
    number = run.batch_size.num_microbatches
    stats = run.task.step_stats(run, number)
    if batches is None:
        batches = run.train_source.next_step(number)
    samples = run.batch_size.global_batch_size
    result = run.runner.train(batches, number, run.progress.consumed_train_samples, samples)
    run.progress.advance(stats, None)
    metrics.add(result, stats)
    WeightAverage(run).after_update(result)
