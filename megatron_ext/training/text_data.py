"""The data of text runs: the steps of a split, and what a step amounts to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ext.data.loader import BatchSource, build_source
from megatron_ext.training.window import StepSize

if TYPE_CHECKING:
    from megatron_ext.data.tokenizers import Tokenizer
    from megatron_ext.training.setup import Run


def text_source(
    run: Run, dataset: Any, tokenizer: Tokenizer, consumed_samples: int, full_epoch: bool
) -> BatchSource:
    """See `data.loader.build_source`."""
    return build_source(
        dataset,
        run.config,
        run.context,
        run.device,
        consumed_samples=consumed_samples,
        eod=tokenizer.eod,
        full_epoch=full_epoch,
    )


def text_step_size(run: Run, num_microbatches: int) -> StepSize:
    """Samples as the batch size counts them, and the rows that are computed for them."""
    rows = run.rows_of(num_microbatches)
    return StepSize(
        samples=run.batch_size.global_batch_size,
        tokens=rows * (run.config.model.seq_length or 0),
        flops=rows * run.flops_per_sample,
    )
