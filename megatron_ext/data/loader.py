"""Data loaders of the three splits on the ranks that read data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_ext.data.batch import Batch, StepLoader
from megatron_ext.data.samplers import RandomSampler, SequentialSampler
from megatron_ext.errors import DataError
from megatron_ext.layout import mtp_rank

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.layout import ParallelContext


def stage_reads_data(config: RunConfig, context: ParallelContext) -> bool:
    """Whether this pipeline stage needs batches.

    The first stage needs the ids, the last one the labels, and multi-token prediction both; the
    other ones only when attention must stop at document ends, whose mask is made from the ids.
    """
    if context.pp_rank == mtp_rank(config):
        return True
    return context.is_first_stage or context.is_last_stage or config.data.reset_attention_mask


def reads_dataset(config: RunConfig, context: ParallelContext) -> bool:
    """Whether this rank opens the dataset; its tensor-parallel peers receive from it."""
    return stage_reads_data(config, context) and context.tp_rank == 0


class BatchSource:
    """An endless or finite supply of the steps of one split on this rank.

    Args:
        loader: gives the micro-batches; None on stages that read no data.
        num_samples: length of the split, None where this rank does not open it.
        whole_epochs: the steps go through the whole split again and again, each time from its
            beginning; the last step of a pass is filled up with samples without targets.
    """

    def __init__(
        self, loader: StepLoader | None, num_samples: int | None, *, whole_epochs: bool = False
    ) -> None:
        self.loader = loader
        self.num_samples = num_samples
        self.whole_epochs = whole_epochs

    def next_step(self, num_microbatches: int) -> list[Batch] | None:
        """Micro-batches of the next step; None on stages that read no data.

        Raises:
            DataError: the data is at its end.
        """
        if self.loader is None:
            return None
        try:
            return self.loader.next_step(num_microbatches)
        except StopIteration:
            raise DataError(
                f"The data ended in the middle of a step (the split holds {self.num_samples} "
                "samples); give more data or fewer iterations."
            ) from None


def build_source(
    dataset: Dataset[Any] | None,
    config: RunConfig,
    context: ParallelContext,
    device: torch.device,
    *,
    consumed_samples: int,
    eod: int,
    full_epoch: bool = False,
) -> BatchSource:
    """The steps of one split, from the sample after ``consumed_samples`` on.

    Args:
        dataset: the split, None on ranks that do not read it.
        config: the run.
        context: the parallel layout of this rank.
        device: where the batches go.
        consumed_samples: samples used so far by all data-parallel ranks together.
        eod: end-of-document id.
        full_epoch: go through the whole split again and again, in order (full validation).
    """
    if not stage_reads_data(config, context):
        return BatchSource(None, None, whole_epochs=full_epoch)
    samples, length = None, None
    if dataset is not None and context.tp_rank == 0:
        length = len(dataset)  # type: ignore[arg-type]
        samples = _samples(dataset, length, config, context, device, consumed_samples, full_epoch)
    micro_batch_size, _ = config.training.batch_sizes
    assert config.model.seq_length is not None
    loader = StepLoader(
        samples,
        context,
        (micro_batch_size, config.model.seq_length),
        device,
        mask_documents_at=eod if config.data.reset_attention_mask else None,
        mtp_depths=config.model.mtp_num_layers or 0,
    )
    return BatchSource(loader, length, whole_epochs=full_epoch)


class FilledUp(Dataset[dict[str, Any]]):
    """A dataset filled up to whole global batches with samples that have no targets.

    They are copies of the first sample without its loss mask, so that they cost no more and every
    rank has the same number of micro-batches.

    Args:
        dataset: samples with a ``loss_mask``.
        length: number of its samples.
        multiple: global batch size.
    """

    def __init__(self, dataset: Dataset[Any], length: int, multiple: int) -> None:
        self._dataset = dataset
        self._length = length
        self._filled = -(-length // multiple) * multiple

    def __len__(self) -> int:
        return self._filled

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < self._length:
            sample: dict[str, Any] = self._dataset[index]
            return sample
        sample = dict(self._dataset[0])
        return {**sample, "loss_mask": sample["loss_mask"] * 0}


def _samples(
    dataset: Dataset[Any],
    length: int,
    config: RunConfig,
    context: ParallelContext,
    device: torch.device,
    consumed_samples: int,
    full_epoch: bool,
) -> Iterator[dict[str, Tensor]]:
    micro_batch_size, global_batch_size = config.training.batch_sizes
    share = (micro_batch_size, context.dp_rank, context.layout.data_parallel_size)
    sampler: SequentialSampler | RandomSampler
    if full_epoch:
        # Whole global batches, so that every pass over the split starts at its beginning.
        dataset = FilledUp(dataset, length, global_batch_size)
        length = len(dataset)
    if config.data.dataloader_type == "cyclic" and not full_epoch:
        sampler = RandomSampler(
            length, consumed_samples, *share, data_sharding=config.data.data_sharding
        )
    else:
        sampler = SequentialSampler(length, consumed_samples, *share)
    workers = config.data.num_workers
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
    )
    return itertools.chain.from_iterable(itertools.repeat(loader)) if full_epoch else iter(loader)
