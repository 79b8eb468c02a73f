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
from megatron_ext.data.samplers import Ints
from megatron_ext.device import Device, select
from megatron_ext.errors import ConfigError
from megatron_ext.inspect.preview.origins import Drawn, Numbered, Origin, Origins
from megatron_ext.parallel.context import ParallelContext, init_groups
from megatron_ext.parallel.grid import Layout
from megatron_ext.train.batch_size import BatchSize, number_of_iterations
from megatron_ext.train.setup import split_sizes
from megatron_ext.train.totals import count_targets

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.text.tokenizers.base import Tokenizer
    from megatron_ext.train.task import Task

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    """One row of a micro-batch; s positions, K multi-token-prediction depths.

    Attributes:
        dp_rank: that computes it.
        microbatch: of the rank's step, from 0.
        number: in the micro-batch, from 0.
        tokens, labels, positions: ``[s]``.
        weights: of the labels in the loss, after the reduction, ``[s]``.
        samples: number of the sample at each position, -1 in padding, ``[s]``; None where a row is
            cut from a stream of documents.
        reaches: a position's attention reaches the position before it, ``[s]``; False at 0.
        mtp_labels, mtp_weights: ``[K, s]``.
        origin: of the row, where it comes from one place.
        origins: of the row's samples, by number.
    """

    dp_rank: int
    microbatch: int
    number: int
    tokens: Ints
    labels: Ints
    positions: Ints
    weights: Floats
    samples: Ints | None
    reaches: NDArray[np.bool_]
    mtp_labels: Ints
    mtp_weights: Floats
    origin: Origin | None
    origins: dict[int, Origin]

    @property
    def size(self) -> int:
        """Number of positions s."""
        return len(self.tokens)

    @property
    def is_padding(self) -> NDArray[np.bool_]:
        """``[s]``."""
        if self.samples is None:
            return np.zeros(self.size, dtype=np.bool_)
        return self.samples < 0


@dataclass(frozen=True)
class Step:
    """One training step on all data-parallel ranks.

    Attributes:
        iteration: from 1, as the log counts.
        consumed: samples before it.
        num_microbatches: of each rank.
        rows: by rank, micro-batch and place in it.
        targets: N, labels with a weight.
        weight: D, the sum of their weights.
        mtp_weights: the same of each multi-token-prediction depth.
        cp_columns: columns of every row that each context-parallel rank keeps.
    """

    iteration: int
    consumed: int
    num_microbatches: int
    rows: list[Row]
    targets: int
    weight: float
    mtp_weights: list[float]
    cp_columns: list[Ints]


@contextmanager
def one_process(layout: Layout) -> Iterator[ParallelContext]:
    """Groups of this process alone, named as the last pipeline stage of a layout."""
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
    """The batches of some steps of a run.

    Args:
        config: the resolved configuration, after the task's preflight.
        task: of the run.
        tokenizer: of the data.
        first: the first step to draw, counted from 1.
        count: steps to draw.

    Raises:
        ConfigError: a step that the run does not have.
        DataError: the data cannot be read, or ends.
    """
    layout = Layout.from_config(config)
    replicas = layout.data_parallel_size
    iterations = number_of_iterations(config, replicas)
    if first < 1 or count < 1 or first + count - 1 > iterations:
        raise ConfigError(
            f"`--step` ({first}) and `--steps` ({count}) must lie within the {iterations} steps "
            "of the run, counted from 1; choose others, or raise `--train-iters`."
        )
    # Workers change when samples are read, not which, and take longer to start than a few steps.
    data = dataclasses.replace(config.data, num_workers=0)
    config = dataclasses.replace(config, data=data)
    with one_process(layout) as context:
        train = task.datasets(
            config,
            tokenizer,
            split_sizes(config, iterations),
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
    """Where a step begins, and its micro-batches where the batch size alone decides."""

    iteration: int
    consumed: int
    num_microbatches: int


def _starts(config: RunConfig, replicas: int, first: int, count: int) -> list[_Start]:
    size, consumed, found = BatchSize(config, replicas), 0, []
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
        self._origins = Origins(train)
        self._source: BatchSource = build_source(
            Numbered(train),
            config,
            self._context,
            torch.device("cpu"),
            consumed_samples=consumed,
            eod=tokenizer.eod,
        )
        assert self._source.loader is not None and self._source.loader.samples is not None
        self._drawn = Drawn(self._source.loader.samples)
        self._source.loader.samples = self._drawn

    def num_microbatches(self, start: _Start) -> int:
        plan = self._source.plan
        usual = start.num_microbatches
        return usual if plan is None else plan.num_microbatches(start.iteration - 1)

    def step(self, start: _Start) -> tuple[list[Row], Tensor]:
        """Rows, and N, D and the weight of each prediction depth, ``[2 + K]``."""
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
            origin, origins = self._origins.of_row(i, samples, drawn)
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
                origin=origin,
                origins=origins,
            )


def _depths(of_depths: Sequence[Tensor], row: int, like: Tensor) -> NDArray[Any]:
    """``[K, s]`` of one row."""
    found = [tensor[row] for tensor in of_depths]
    return (torch.stack(found) if found else like.new_zeros(0, like.size(1))).numpy()


def _reaches(batch: Batch) -> Tensor:
    """Whether attention goes from a position to the one before it, ``[b, s]`` bool."""
    reaches = torch.ones_like(batch.tokens, dtype=torch.bool)
    if batch.attention_mask is not None:
        reaches[:, 1:] = ~batch.attention_mask[:, 0].diagonal(offset=-1, dim1=1, dim2=2)
    reaches[:, 0] = False
    return reaches


class _Place:
    """What megatron-core's cut asks of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def context_parallel_columns(config: RunConfig, size: int) -> list[Ints]:
    """Columns of a row that each context-parallel rank keeps, by megatron-core's own cut.

    Called while process groups exist; without any, megatron-core cuts nothing.
    """
    length = config.model.seq_length
    assert length is not None
    kept = []
    for rank in range(size):
        columns = {"columns": torch.arange(length).unsqueeze(0)}
        cut = get_batch_on_this_cp_rank(columns, cp_group=_Place(rank, size))
        kept.append(cut["columns"][0].numpy())
    return kept
