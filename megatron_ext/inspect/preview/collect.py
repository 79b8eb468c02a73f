"""Draws the batches of training steps through the trainer's own code, in a single process.

Datasets, loaders and loss weights are the same as in a run with the flags' layout. The process
takes the role of the last pipeline stage, where the loss is computed, for one data-parallel rank
after the other. Rows have the full sequence length: they are not cut for context parallelism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megatron_ext.config.batch_size import BatchSize, number_of_iterations
from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch, StepLoader
from megatron_ext.data.loader import (
    BatchSource,
    StepDataset,
    as_step_dataset,
    build_source,
    reads_dataset,
)
from megatron_ext.data.samplers import Ints
from megatron_ext.device import Device, select
from megatron_ext.errors import ConfigError
from megatron_ext.inspect.preview.rows import Provenance, Row, Step
from megatron_ext.parallel.context import ParallelContext, init_groups
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.data.blend import source_options
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.direct import DirectDataset
from megatron_ext.text.sft.dataset import SftDataset
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.batch_size import split_sizes
from megatron_ext.train.step import count_targets
from megatron_ext.train.task import Task


@contextmanager
def one_process(layout: Layout) -> Iterator[ParallelContext]:
    """Yield a context in which one process takes the role of a rank of the last pipeline stage."""
    device = select()
    if device.kind == "cpu":
        device.activate(0)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    alone = init_groups(Layout(1), Device(device.kind, "gloo"))
    try:
        last = layout.placement.rank_of(layout.placement.num_stages - 1)
        yield dataclasses.replace(alone, layout=layout, pp_rank=last)
    finally:
        alone.destroy()


def collect(
    config: RunConfig, task: Task, tokenizer: Tokenizer, *, first: int, count: int
) -> list[Step]:
    """Return the batches of ``count`` steps from step ``first`` on, counted from 1.

    ``config`` must be the configuration that `Task.preflight` returned.

    Raises:
        ConfigError: the run has fewer steps, or ``first`` or ``count`` is below 1.
    """
    layout = Layout.from_config(config.parallel)
    replicas = layout.data_parallel_size
    length = config.model.seq_length
    iterations = number_of_iterations(config.training, length, replicas)
    if first < 1 or count < 1 or first + count - 1 > iterations:
        raise ConfigError(
            f"`--step` ({first}) and `--steps` ({count}) must lie within the {iterations} steps "
            "of the run, counted from 1; choose others, or raise `--train-iters`."
        )
    # Worker processes do not change which samples are read, and are slow to start for a few steps.
    training = dataclasses.replace(config.training, num_workers=0)
    config = dataclasses.replace(config, training=training)
    with one_process(layout) as context:
        train = task.datasets(
            config,
            tokenizer,
            split_sizes(config.training, length, replicas),
            lambda: reads_dataset(config.model, config.parallel, context),
        ).train
        assert train is not None and length is not None
        starts = _starts(BatchSize(training, length, replicas), first, count)
        drawn = [
            _Replica(config, task, context, train, tokenizer, rank, starts[0].consumed)
            for rank in range(replicas)
        ]
        columns = _columns(length, layout.context_parallel_size)
        return [_step(start, drawn, columns) for start in starts]


@dataclass(frozen=True)
class _Start:
    """A step's number from 1, and what is known before its batches are drawn.

    ``consumed`` is the number of samples consumed before the step. ``num_microbatches`` is each
    rank's number of micro-batches, unless the dataset itself plans its steps (`StepPlan`).
    """

    iteration: int
    consumed: int
    num_microbatches: int


def _starts(size: BatchSize, first: int, count: int) -> list[_Start]:
    consumed = 0
    starts = []
    for iteration in range(1, first + count):
        size.update(consumed)
        if iteration >= first:
            starts.append(_Start(iteration, consumed, size.num_microbatches))
        consumed += size.global_batch_size
    return starts


def _step(start: _Start, replicas: Sequence[_Replica], cp_columns: list[Ints]) -> Step:
    drawn = [replica.step(start) for replica in replicas]
    totals = torch.stack([counted for _, counted in drawn])
    main, weight, *mtp = totals.double().sum(dim=0).tolist()
    return Step(
        iteration=start.iteration,
        consumed=start.consumed,
        num_microbatches=replicas[-1].num_microbatches(start),
        rows=[row for rows, _ in drawn for row in rows],
        targets=round(main),
        weight=weight,
        mtp_weights=mtp,
        cp_columns=cp_columns,
    )


class _Replica:
    def __init__(
        self,
        config: RunConfig,
        task: Task,
        context: ParallelContext,
        train: Dataset[Any],
        tokenizer: Tokenizer,
        rank: int,
        consumed: int,
    ) -> None:
        self._config = config
        self._task = task
        self._rank = rank
        self._context = dataclasses.replace(context, dp_rank=rank)
        self._dataset = train
        self._known = dict[int, Provenance]()
        self._source: BatchSource = build_source(
            Numbered(train),
            config,
            self._context,
            torch.device("cpu"),
            consumed_samples=consumed,
            **source_options(config.section(DataConfig), tokenizer.eod),
        )
        loader = self._source.loader
        assert isinstance(loader, StepLoader) and loader.samples is not None
        self._drawn: dict[str, Tensor] = {}
        loader.samples = self._noted(loader.samples)

    def _noted(self, samples: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        for self._drawn in samples:
            yield self._drawn

    def num_microbatches(self, start: _Start) -> int:
        plan = self._source.plan
        if plan is None:
            return start.num_microbatches
        return plan.num_microbatches(start.iteration - 1)

    def step(self, start: _Start) -> tuple[list[Row], Tensor]:
        """Return the rows of a step, and a tensor ``[2 + K]`` with totals of the step.

        The totals are the number of targets, the sum of the targets' weights, and that sum for the
        targets of each of K multi-token-prediction (MTP) depths.
        """
        batches = []
        reaches = []
        drawn = []
        for _ in range(self.num_microbatches(start)):
            fetched = self._source.next_step(1)
            assert fetched is not None
            reaches.append(_reaches(fetched[0]))
            drawn.append(self._drawn)
            batches.append(fetched[0])
        if self._task.prepare_batches is not None:
            batches = list(self._task.prepare_batches(self._config, batches, self._context))
        counts = count_targets(batches, self._context)
        rows = [
            row
            for i, (batch, reach, sample) in enumerate(zip(batches, reaches, drawn, strict=True))
            for row in self._rows(i, batch, reach, sample)
        ]
        return rows, torch.cat([torch.stack([counts.main, counts.weight]), counts.mtp])

    def _rows(
        self, microbatch: int, batch: Batch, reaches: Tensor, drawn: dict[str, Tensor]
    ) -> Iterator[Row]:
        for i in range(batch.tokens.size(0)):
            documents = None if batch.sample_ids is None else batch.sample_ids[i].numpy()
            samples = None if isinstance(self._dataset, DirectDataset) else documents
            numbers = [] if samples is None else [int(x) for x in np.unique(samples) if x >= 0]
            yield Row(
                dp_rank=self._rank,
                microbatch=microbatch,
                number=i,
                tokens=batch.tokens[i].numpy(),
                labels=batch.labels[i].numpy(),
                positions=batch.position_ids[i].numpy(),
                weights=batch.loss_weights[i].numpy(),
                samples=samples,
                documents=None if documents is samples else documents,
                reaches=reaches[i].numpy(),
                mtp_labels=_depths(batch.mtp_labels, i, batch.tokens),
                mtp_weights=_depths(batch.mtp_loss_weights, i, batch.loss_weights),
                provenance=self._provenance(i, drawn) if samples is None else None,
                sample_provenance={number: self._conversation(number) for number in numbers},
            )

    def _provenance(self, row: int, drawn: dict[str, Tensor]) -> Provenance | None:
        """Return the sample and dataset of a row, or None if the samples carry no index.

        ``drawn`` has the loader's tensors of the row's micro-batch: ``sample`` (see `Numbered`)
        and, for a blend, ``dataset_id``.
        """
        if "sample" not in drawn:
            return None
        dataset: Any = self._dataset
        if isinstance(dataset, DirectDataset):
            sample = int(drawn["sample"][row])
            return Provenance(sample, dataset.token_ranges(sample, sample + 1)[0][1])
        if "dataset_id" in drawn:
            dataset = dataset.datasets[int(drawn["dataset_id"][row])]
        source = str(getattr(dataset, "dataset_path", None) or type(dataset).__name__)
        return Provenance(int(drawn["sample"][row]), source)

    def _conversation(self, sample: int) -> Provenance:
        if sample not in self._known:
            dataset = self._dataset
            provenance = Provenance(sample, type(dataset).__name__)
            if isinstance(dataset, SftDataset):
                store, place = dataset.place_of(sample)
                cut = int(store.lengths[place]) - 1 - int(dataset.lengths[sample])
                provenance = Provenance(sample, *store.source_of(place), cut)
            self._known[sample] = provenance
        return self._known[sample]


def _depths(depths: Sequence[Tensor], row: int, like: Tensor) -> NDArray[Any]:
    """Return row ``row`` of each MTP depth's tensor ``[b, s]``, stacked to ``[K, s]`` for K depths.

    Without MTP (K = 0) the result has the length s and dtype of ``like`` ``[b, s]``.
    """
    rows = [tensor[row] for tensor in depths]
    return (torch.stack(rows) if rows else like.new_zeros(0, like.size(1))).numpy()


def _reaches(batch: Batch) -> Tensor:
    """Return whether each position attends to the previous position, ``[b, s]`` bool."""
    reaches = torch.ones_like(batch.tokens, dtype=torch.bool)
    if batch.attention_mask is not None:
        documents = batch.attention_mask
        reaches[:, 1:] = documents[:, 1:] == documents[:, :-1]
    reaches[:, 0] = False
    return reaches


def _columns(length: int, size: int) -> list[Ints]:
    """Return, for each of ``size`` context-parallel ranks, the columns it gets of a row of tokens.

    A row has ``length`` columns; megatron-core gives each rank two slices of it.
    """
    if size == 1:
        return [torch.arange(length).numpy()]
    # For equal work, a rank gets one slice from the front and the mirrored slice from the end.
    parts = torch.arange(length).chunk(2 * size)
    return [torch.cat((parts[rank], parts[-1 - rank])).numpy() for rank in range(size)]


class Numbered(StepDataset):
    """Wraps a dataset so that each sample carries its index under the key ``sample``.

    A dataset that plans its own steps (`StepPlan`) returns its samples unchanged, since its batches
    have the indices already (``sample_ids``).
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.plan = as_step_dataset(dataset).plan
        self.packs_documents = as_step_dataset(dataset).packs_documents

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        sample: dict[str, Any] = self._dataset[index]
        return {**sample, "sample": index} if self.plan is None else sample
