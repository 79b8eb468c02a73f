"""Runs a step with megatron-core's own schedule; only ``core-`` schedules import this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_ext import core
from megatron_ext.data.batch import Batch
from megatron_ext.losses.contract import LossFunction, StepCounts, checked
from megatron_ext.schedules.runtime import Masks

ForwardStep = Callable[[Any, torch.nn.Module, Any], tuple[Tensor, LossFunction]]


def run_by_core(
    forward_step: ForwardStep,
    chunks: Sequence[torch.nn.Module],
    seq_length: int | None,
    micro_batch_size: int,
    batches: Sequence[Batch],
    counts: StepCounts | None,
    masks: Masks | None,
    **options: bool,
) -> list[Any]:
    """Run a step with megatron-core's schedule, which takes ``options``.

    The other arguments and the result are those of `PipelineEngine.run`.
    """

    def step(
        iterator: Iterator[tuple[int, Batch]], chunk: torch.nn.Module
    ) -> tuple[Tensor, LossFunction]:
        microbatch, batch = next(iterator)
        with nullcontext() if masks is None else masks(microbatch):
            output, loss = forward_step(batch, chunk, counts)
        return output, checked(loss)

    given = list(enumerate(batches))
    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=core.one_or_list([iter(given) for _ in chunks]),
        model=core.one_or_list(list(chunks)),
        num_microbatches=len(given),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=seq_length,
        **options,
    )
    return reports
