"""Builds a run of pretrain_gpt.py within a test, to look at it from inside."""

import math
from collections.abc import Collection, Sequence

import torch

from megatron_ext.data.batch import Batch
from megatron_ext.device import select
from megatron_ext.parallel.context import ParallelContext, seed_everything
from megatron_ext.text.task import GPT
from megatron_ext.train.callbacks.optional import WeightAverage
from megatron_ext.train.loop import IntervalMetrics
from megatron_ext.train.run import Run
from megatron_ext.train.setup import build_run
from megatron_ext.train.step import StepInputs, StepResult
from tests.training_runs import prepared


def build(flags: Sequence[str], context: ParallelContext) -> Run:
    kind = select().kind
    _, config, tokenizer = prepared(flags, GPT, ranks=context.layout.world_size, device=kind)
    seed_everything(context, config.training.seed)
    return build_run(config, GPT, context, torch.device(kind), tokenizer)


def spoil_steps(run: Run, steps: Collection[int]) -> None:
    """Let the gradients of some steps be NaN."""

    def spoil() -> None:
        if run.progress.iteration + 1 in steps:
            for chunk in run.chunks:
                for parameter in chunk.parameters():
                    parameter.main_grad.fill_(math.nan)

    run.runner.observer = spoil


def train_step(run: Run, batches: list[Batch] | None = None) -> StepResult:
    """Train on a step's batches, which may have been read before."""
    number = run.batch_size.num_microbatches
    if batches is None:
        batches = run.train_source.next_step(number)
    inputs = StepInputs(batches, number, run.progress.consumed_train_samples)
    return run.runner.train(inputs, run.batch_size.global_batch_size)


def one_step(run: Run, metrics: IntervalMetrics, batches: list[Batch] | None = None) -> None:
    """Take a step as the loop does, with batches that may have been read before."""
    stats = run.task.step_stats(run, run.batch_size.num_microbatches)
    result = train_step(run, batches)
    run.progress.advance(stats, None)
    metrics.add(result, stats)
    if run.ema is not None:
        WeightAverage(run).after_update(result)
