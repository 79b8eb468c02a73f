"""What pretrain_video.py --task streaming trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.data.gpt import Datasets
from megatron_ext.data.loader import BatchSource
from megatron_ext.losses.contract import LossFunction, StepCounts
from megatron_ext.streaming.ratio import passes
from megatron_ext.training.streaming.configuration import (
    chunk_tokens,
    prepare_streaming,
)
from megatron_ext.training.streaming.networks import build_generator_chunk
from megatron_ext.training.streaming.step import StreamingRunner
from megatron_ext.training.streaming.view import view_while_training
from megatron_ext.training.task import Task
from megatron_ext.training.window import StepSize

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.data.tokenizers import Tokenizer
    from megatron_ext.training.setup import Run


def no_datasets(
    config: RunConfig,
    tokenizer: Tokenizer,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """See `Task.datasets`: the generator makes the videos, and its runner reads the prompts."""
    return Datasets(None, None, None)


def no_batches(
    run: Run, dataset: Any, tokenizer: Tokenizer, consumed_samples: int, full_epoch: bool
) -> BatchSource:
    """See `Task.source`."""
    return BatchSource(None, None)


def _no_forward_step(
    config: RunConfig, batch: Any, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    raise NotImplementedError("streaming steps are run by `StreamingRunner.train`")


def streaming_step_size(run: Run, num_microbatches: int) -> StepSize:
    """Chunks' samples and tokens, and no count of operations; see `Task.step_size`."""
    runner = run.runner
    assert isinstance(runner, StreamingRunner)
    chunks = len(passes(runner.options, runner.companion.steps, num_microbatches))
    rows = run.rows_of(1) * chunks
    return StepSize(
        samples=run.rows_of(num_microbatches),
        tokens=rows * chunk_tokens(run.config.streaming),
        flops=0.0,
    )


STREAMING = Task(
    datasets=no_datasets,
    model_chunk=build_generator_chunk,
    forward_step=_no_forward_step,
    source=no_batches,
    step_size=streaming_step_size,
    after_step=view_while_training,
    sample_name="chunks",
    perplexity=False,
    preflight=prepare_streaming,
    step_runner=StreamingRunner,
)
