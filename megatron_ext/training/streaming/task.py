"""What pretrain_video.py --task streaming trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ext.data.loader import BatchSource
from megatron_ext.streaming.ratio import passes
from megatron_ext.training.streaming.configuration import (
    chunk_tokens,
    prepare_streaming,
)
from megatron_ext.training.streaming.networks import build_generator_chunk
from megatron_ext.training.streaming.step import StreamingRunner
from megatron_ext.training.streaming.view import view_while_training
from megatron_ext.training.task import Task, no_datasets
from megatron_ext.training.window import StepSize

if TYPE_CHECKING:
    from megatron_ext.data.tokenizers import Tokenizer
    from megatron_ext.training.setup import Run


def no_batches(
    run: Run, dataset: Any, tokenizer: Tokenizer, consumed_samples: int, full_epoch: bool
) -> BatchSource:
    """See `Task.source`."""
    return BatchSource(None, None)


def streaming_step_size(run: Run, num_microbatches: int) -> StepSize:
    """Chunks' samples and tokens; see `Task.step_size`. The runner counts the operations."""
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
    source=no_batches,
    step_size=streaming_step_size,
    after_step=view_while_training,
    sample_name="chunks",
    perplexity=False,
    preflight=prepare_streaming,
    step_runner=StreamingRunner,
)
