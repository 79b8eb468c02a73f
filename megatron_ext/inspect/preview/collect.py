"""Draws the batches of training steps through the trainer's own code, on one process.

The datasets, the loaders and the weights are those of a run in the layout of the flags. The process
stands in for the last pipeline stage of each data-parallel rank in turn, and rows are kept whole,
as they are before the context-parallel cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.utils import get_batch_on_this_cp_rank
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megatron_ext.data.batch import Batch
from megatron_ext.data.loader import BatchSource, build_source, reads_dataset
from megatron_ext.data.samplers import Ints, StepPlan
from megatron_ext.device import Device, select
from megatron_ext.errors import ConfigError
from megatron_ext.inspect.preview.rows import Provenance, Row, Step
from megatron_ext.parallel.context import ParallelContext, init_groups
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.config import DataConfig
from megatron_ext.text.sft.dataset import SftDataset
from megatron_ext.train.batch_size import BatchSize, number_of_iterations, split_sizes
from megatron_ext.train.totals import count_targets

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.text.tokenizers.base import Tokenizer
    from megatron_ext.train.task import Task


@contextmanager
def one_process(layout: Layout) -> Iterator[ParallelContext]:
    """Make groups of this process alone, placed as the last pipeline stage of a layout."""
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
    """Draw the batches of some steps of a run.

    Args:
        config: the resolved configuration, after the task's preflight.
        task: the task of the run.
        tokenizer: the tokenizer of the data.
        first: the first step to draw, counted from 1.
        count: steps to draw.

    Raises:
        ConfigError: a step that the run does not have.
        DataError: the data cannot be read, or ends.
    """
    layout = Layout.from_config(config.parallel)
    replicas = layout.data_parallel_size
    iterations = number_of_iterations(config.training, config.model.seq_length, replicas)
    if first < 1 or count < 1 or first + count - 1 > iterations:
        raise ConfigError(
            f"`--step` ({first}) and `--steps` ({count}) must lie within the {iterations} steps "
            "of the run, counted from 1; choose others, or raise `--train-iters`."
        )
    # Workers change when samples are read, not which, and take longer to start than a few steps.
    training = dataclasses.replace(config.training, num_workers=0)
    config = dataclasses.replace(config, training=training)
    with one_process(layout) as context:
        train = task.datasets(
            config,
            tokenizer,
            split_sizes(config.training, iterations),
            lambda: reads_dataset(config, context),
        ).train
        assert train is not None
        starts = _starts(config, replicas, first, count)
        drawn = [
            _Replica(config, task, context, train, tokenizer, rank, starts[0].consumed)
            for rank in range(replicas)
        ]
        columns = context_parallel_columns(config, layout.context_parallel_size)
        return [_step(start, drawn, columns) for start in starts]


@dataclass(frozen=True)
class _Start:
    """The beginning of a step, with the micro-batches that the batch size alone gives it."""

    iteration: int
    consumed: int
    num_microbatches: int


def _starts(config: RunConfig, replicas: int, first: int, count: int) -> list[_Start]:
    size = BatchSize(config.training, config.model.seq_length, replicas)
    consumed, found = 0, []
    for iteration in range(1, first + count):
        size.update(consumed)
        if iteration >= first:
            found.append(_Start(iteration, consumed, size.num_microbatches))
        consumed += size.global_batch_size
    return found


def _step(start: _Start, replicas: Sequence[_Replica], cp_columns: list[Ints]) -> Step:
    rows: list[Row] = []
    totals: list[Tensor] = []
    microbatches = 0
    for replica in replicas:
        own, counted = replica.step(start)
        rows += own
        totals.append(counted)
        microbatches = replica.num_microbatches(start)
    main, weight, *mtp = torch.stack(totals).double().sum(dim=0).tolist()
    return Step(
        iteration=start.iteration,
        consumed=start.consumed,
        num_microbatches=microbatches,
        rows=rows,
        targets=round(main),
        weight=weight,
        mtp_weights=mtp,
        cp_columns=cp_columns,
    )


class _Replica:
    """One data-parallel rank."""

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
        self._config, self._task, self._rank = config, task, rank
        self._context = dataclasses.replace(context, dp_rank=rank)
        self._provenance = ProvenanceLookup(train)
        data = config.section(DataConfig)
        self._source: BatchSource = build_source(
            Numbered(train),
            config,
            self._context,
            torch.device("cpu"),
            consumed_samples=consumed,
            mask_documents_at=tokenizer.eod if data.reset_attention_mask else None,
            cyclic=data.dataloader_type == "cyclic",
            data_sharding=data.data_sharding,
        )
        assert self._source.loader is not None and self._source.loader.samples is not None
        self._drawn = Drawn(self._source.loader.samples)
        self._source.loader.samples = self._drawn

    def num_microbatches(self, start: _Start) -> int:
        plan = self._source.plan
        usual = start.num_microbatches
        return usual if plan is None else plan.num_microbatches(start.iteration - 1)

    def step(self, start: _Start) -> tuple[list[Row], Tensor]:
        """Draw rows, and N, D and the weight of each prediction depth, ``[2 + K]``."""
        batches, reaches, drawn = [], [], []
        for _ in range(self.num_microbatches(start)):
            # One at a time: the attention masks of a whole step would not fit many a machine.
            drawn_batches = self._source.next_step(1)
            assert drawn_batches is not None
            batch = drawn_batches[0]
            reaches.append(_reaches(batch))
            drawn.append(self._drawn.last)
            batches.append(dataclasses.replace(batch, attention_mask=None))
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
            samples = None if batch.sample_ids is None else batch.sample_ids[i].numpy()
            provenance, by_sample = self._provenance.of_row(i, samples, drawn)
            yield Row(
                dp_rank=self._rank,
                microbatch=microbatch,
                number=i,
                tokens=batch.tokens[i].numpy(),
                labels=batch.labels[i].numpy(),
                positions=batch.position_ids[i].numpy(),
                weights=batch.loss_weights[i].numpy(),
                samples=samples,
                reaches=reaches[i].numpy(),
                mtp_labels=_depths(batch.mtp_labels, i, batch.tokens),
                mtp_weights=_depths(batch.mtp_loss_weights, i, batch.loss_weights),
                provenance=provenance,
                sample_provenance=by_sample,
            )


def _depths(of_depths: Sequence[Tensor], row: int, like: Tensor) -> NDArray[Any]:
    """Return one row of each prediction depth, ``[K, s]``."""
    found = [tensor[row] for tensor in of_depths]
    return (torch.stack(found) if found else like.new_zeros(0, like.size(1))).numpy()


def _reaches(batch: Batch) -> Tensor:
    """Return whether a position attends to the one before it, ``[b, s]`` bool."""
    reaches = torch.ones_like(batch.tokens, dtype=torch.bool)
    if batch.attention_mask is not None:
        reaches[:, 1:] = ~batch.attention_mask[:, 0].diagonal(offset=-1, dim1=1, dim2=2)
    reaches[:, 0] = False
    return reaches


class _Place:
    """The two answers that megatron-core's cut asks of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def context_parallel_columns(config: RunConfig, size: int) -> list[Ints]:
    """Return the columns of a row that each context-parallel rank keeps.

    megatron-core makes the cut, while process groups exist; without any it cuts nothing.
    """
    length = config.model.seq_length
    assert length is not None
    kept = []
    for rank in range(size):
        columns = {"columns": torch.arange(length).unsqueeze(0)}
        cut = get_batch_on_this_cp_rank(columns, cp_group=_Place(rank, size))
        kept.append(cut["columns"][0].numpy())
    return kept


class Numbered(Dataset[dict[str, Any]]):
    """A dataset whose samples carry their number; rows of conversations carry theirs anyway."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.plan: StepPlan | None = getattr(dataset, "plan", None)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        sample: dict[str, Any] = self._dataset[index]
        return {**sample, "sample": index} if self.plan is None else sample


class Drawn(Iterator[dict[str, Tensor]]):
    """Samples on their way into a loader.

    Attributes:
        last: the sample that was drawn last.
    """

    def __init__(self, samples: Iterator[dict[str, Tensor]]) -> None:
        self._samples = samples
        self.last: dict[str, Tensor] = {}

    def __next__(self) -> dict[str, Tensor]:
        self.last = next(self._samples)
        return self.last


class ProvenanceLookup:
    """Looks up where the samples of one split come from."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._known: dict[int, Provenance] = {}

    def of_row(
        self, row: int, samples: Ints | None, drawn: dict[str, Tensor]
    ) -> tuple[Provenance | None, dict[int, Provenance]]:
        """Return where a row comes from, or each of its samples.

        Args:
            row: place of the row in the micro-batch.
            samples: number of the sample at each position, -1 in padding, ``[s]``.
            drawn: the collated samples of the micro-batch.
        """
        if samples is not None:
            numbers = [int(number) for number in np.unique(samples) if number >= 0]
            return None, {number: self._conversation(number) for number in numbers}
        if "sample" not in drawn:
            return None, {}
        return Provenance(int(drawn["sample"][row]), self._prefix(row, drawn)), {}

    def _prefix(self, row: int, drawn: dict[str, Tensor]) -> str:
        """Return the dataset that a row was cut from; a blend numbers its datasets."""
        dataset = self._dataset
        if "dataset_id" in drawn:
            dataset = dataset.datasets[int(drawn["dataset_id"][row])]
        return str(getattr(dataset, "dataset_path", None) or type(dataset).__name__)

    def _conversation(self, sample: int) -> Provenance:
        if sample not in self._known:
            self._known[sample] = self._look_up(sample)
        return self._known[sample]

    def _look_up(self, sample: int) -> Provenance:
        dataset = self._dataset
        if not isinstance(dataset, SftDataset):
            return Provenance(sample, type(dataset).__name__)
        store, place = dataset.place_of(sample)
        number = place
        for _, count in store.about["files"]:
            if number < count:
                break
            number -= count
        cut = int(store.lengths[place]) - 1 - int(dataset.lengths[sample])
        return Provenance(sample, dataset.source_of(sample), number + 1, cut)
