"""Forward passes through the pipeline outside training steps, to sample from a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.losses.contract import StepCounts
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.runtime import PipelineEngine


def forward_engine(
    chunks: Sequence[torch.nn.Module],
    transformer_config: TransformerConfig,
    context: ParallelContext,
) -> PipelineEngine:
    """Build an engine that runs only forward passes, for sampling.

    Use it where training has no engine: if megatron-core's schedules run the training steps, or
    for a network that is not trained.
    """
    placement = context.placement
    schedule = "interleaved" if placement.num_chunks > 1 else "1f1b"
    schedule = "zb-v" if placement.v_shape else schedule
    return PipelineEngine(schedule, chunks, transformer_config, context)


def collect_outputs(
    engine: PipelineEngine,
    inputs: Sequence[Mapping[str, Any]],
    shape: Sequence[int],
    before: Callable[[int], None] = lambda microbatch: None,
) -> list[Tensor]:
    """Run forward passes; return each micro-batch's output, or [] on ranks without the last stage.

    Args:
        inputs: for each micro-batch, the keyword arguments with which every chunk is called.
        shape: shape ``[s, b, h]`` of the tensor passed between stages.
        before: called with the index of a micro-batch before each chunk runs on it.
    """

    def forward_step(
        batch: tuple[int, Mapping[str, Any]], chunk: torch.nn.Module, _counts: StepCounts | None
    ) -> tuple[Tensor, Any]:
        index, arguments = batch
        before(index)
        return chunk(**arguments), _unchanged

    batches = list(enumerate(inputs))
    return engine.run(
        forward_step, batches, len(inputs), shape, forward_only=True, collect_non_loss_data=True
    )


def _unchanged(output: Tensor, *, non_loss_data: bool) -> Tensor:
    """Return the output of the last stage unchanged, in place of a loss."""
    assert non_loss_data
    return output


@contextmanager
def evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Set evaluation mode inside the block, and restore all modes after it."""
    before = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode
