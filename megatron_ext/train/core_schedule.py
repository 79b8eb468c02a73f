"""Runs a step with megatron-core's own schedule; only ``core-`` schedules import this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext import core
from megatron_ext.data.batch import Batch
from megatron_ext.losses.contract import LossFunction, StepCounts, checked
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.plan import Shape
from megatron_ext.schedules.runtime import Masks

ForwardStep = Callable[[Any, torch.nn.Module, Any], tuple[Tensor, LossFunction]]


class CoreSchedule:
    """megatron-core's schedule with the interface of a `PipelineEngine`."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        transformer_config: TransformerConfig,
        context: ParallelContext,
    ) -> None:
        self._chunks = chunks
        self._recorder = context.recorder
        cut = context.pgs.tp.size() if transformer_config.sequence_parallel else 1
        self._parts = context.pgs.cp.size() * cut
        """Into how many parts ranks cut a sequence."""

    def run(
        self,
        forward_step: ForwardStep,
        batches: Sequence[Batch],
        num_microbatches: int,
        shape: Shape,
        *,
        counts: StepCounts | None = None,
        masks: Masks | None = None,
        **options: bool,
    ) -> list[Any]:
        """Run a step with megatron-core's schedule, which takes ``options``.

        The other arguments and the result are those of `PipelineEngine.run`. The micro-batches have
        one shape.
        """

        def step(
            iterator: Iterator[tuple[int, Batch]], chunk: torch.nn.Module
        ) -> tuple[Tensor, LossFunction]:
            microbatch, batch = next(iterator)
            with nullcontext() if masks is None else masks(microbatch):
                output, loss = forward_step(batch, chunk, counts)
            return output, checked(loss)

        given = list(enumerate(batches))
        length, micro_batch_size, *_ = shape[0] if isinstance(shape, list) else shape
        seq_length = length * self._parts
        with self._recorder.phase("forward"):
            reports: list[Any] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=core.one_or_list([iter(given) for _ in self._chunks]),
                model=core.one_or_list(list(self._chunks)),
                num_microbatches=num_microbatches,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=seq_length,
                **options,
            )
        return reports
