"""Which rows a data-parallel rank computes in each step of each epoch.

Everything here is a function of the samples' lengths and of ``(seed, epoch, step)``, with no
communication, so that all ranks find the same plan and a run resumes at any step.

An epoch is exact: every sample is seen once. Its last step may be short, and is filled with empty
rows (``[]``), which weigh nothing in the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from megatron_ext.errors import DataError
from megatron_ext.text.sft.packing import (
    CostModel,
    Ints,
    Row,
    balance,
    cost,
    fitting_lengths,
    named,
    pack,
    token_budget,
)


class Epochs(Protocol):
    """Rows of each rank in each step of each epoch."""

    steps_per_epoch: int

    def step(self, epoch: int, step: int) -> list[list[Row]]:
        """``[rank][row]`` sample numbers; ``step`` counts within the epoch."""
        ...


def shuffled(count: int, *seeds: int) -> Ints:
    """A permutation ``[count]``, of raw generator bits, which no numpy release changes."""
    return np.argsort(np.random.PCG64(seeds).random_raw(count), kind="stable").astype(np.int64)


def _order(count: int, seed: int | None, *seeds: int) -> Ints:
    return np.arange(count) if seed is None else shuffled(count, seed, *seeds)


def _check_step(step: int, steps_per_epoch: int) -> None:
    if not 0 <= step < steps_per_epoch:
        raise DataError(
            f"Step {step} must be one of the {steps_per_epoch} steps of an epoch, counted "
            "from 0; divide by their number to find the epoch."
        )


@dataclass
class PackedEpochs:
    """Rows of each rank in each step of each epoch.

    Every epoch is packed anew with samples of equal length exchanged (the number of rows stays),
    and its rows are shuffled by ``seed``; the row that packing could not fill comes last. Without
    a seed all epochs are the same, in the order of packing.

    Attributes:
        lengths: tokens of each sample, ``[n]``; see `padded_lengths`.
        capacity: tokens of a row.
        rows_per_step: global batch size, a multiple of ``num_ranks``, the data-parallel size.
        similar_rows: draw a step in groups of ``num_ranks`` neighbours by cost. Without, a rank
            with fewer than eight rows per step may have too few to swap; with it, the documents
            of a small step are alike in length.

    Raises:
        DataError: a sample is empty, or longer than a row.
    """

    lengths: ArrayLike
    capacity: int
    rows_per_step: int
    num_ranks: int
    model: CostModel
    seed: int | None
    similar_rows: bool = False

    def __post_init__(self) -> None:
        self._sizes = fitting_lengths(self.lengths, self.capacity)
        self._load(0)
        self.steps_per_epoch = -(-len(self._rows) // self.rows_per_step)

    def step(self, epoch: int, step: int) -> list[list[Row]]:
        """``[rank][row]`` sample numbers; ``step`` counts within the epoch.

        Raises:
            ConfigError, DataError: rows that cannot be dealt equally; the epoch has fewer steps.
        """
        _check_step(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._load(epoch)
        rows = self._rows[step * self.rows_per_step : (step + 1) * self.rows_per_step]
        rows = rows + [[] for _ in range(self.rows_per_step - len(rows))]
        costs = [cost(self._sizes[row], self.model) for row in rows]
        return [[rows[row] for row in rank] for rank in balance(costs, self.num_ranks)]

    def _load(self, epoch: int) -> None:
        samples = _order(self._sizes.size, self.seed, epoch)
        rows = named(pack(self._sizes[samples], self.capacity), samples.tolist())
        group = 1
        if self.similar_rows:
            group = self.num_ranks
            rows.sort(key=lambda row: -cost(self._sizes[row], self.model))
        whole = max(0, len(rows) - 1) // group
        order = (_order(whole, self.seed, epoch, 1)[:, None] * group + np.arange(group)).ravel()
        self._rows = [rows[row] for row in order.tolist()] + rows[whole * group :]
        self._epoch = epoch


@dataclass
class PaddedEpochs:
    """One sample in each row; the rows of a step are dealt to the ranks in turn.

    Attributes:
        num_samples: of the split.
        rows_per_step: global batch size, a multiple of ``num_ranks * micro_batch_size``.
        num_ranks: data-parallel size.
        micro_batch_size: rows that a rank takes at each turn.
        seed: of the order, anew in each epoch; None keeps the order of the split.
    """

    num_samples: int
    rows_per_step: int
    num_ranks: int
    micro_batch_size: int
    seed: int | None

    def __post_init__(self) -> None:
        self.steps_per_epoch = -(-self.num_samples // self.rows_per_step)

    def step(self, epoch: int, step: int) -> list[list[Row]]:
        """See `Epochs.step`."""
        _check_step(step, self.steps_per_epoch)
        order = _order(self.num_samples, self.seed, epoch)
        begin = step * self.rows_per_step
        rows: list[Row] = [[i] for i in order[begin : begin + self.rows_per_step].tolist()]
        rows += [[] for _ in range(self.rows_per_step - len(rows))]
        turn = self.num_ranks * self.micro_batch_size
        return [
            [
                rows[first + i]
                for first in range(rank * self.micro_batch_size, self.rows_per_step, turn)
                for i in range(self.micro_batch_size)
            ]
            for rank in range(self.num_ranks)
        ]


@dataclass
class BudgetEpochs:
    """As many rows in each step as its samples need; see `token_budget`.

    Attributes:
        lengths: tokens of each sample, ``[n]``.
        capacity: tokens of a row.
        samples_per_step: global batch size.
        num_ranks: data-parallel size.
        multiple: the rows of a rank are filled up to a multiple of this with empty ones.
        seed: of the order, anew in each epoch; None keeps the order of the split.

    Raises:
        DataError: a sample is empty, or longer than a row.
    """

    lengths: ArrayLike
    capacity: int
    samples_per_step: int
    num_ranks: int
    model: CostModel
    seed: int | None
    multiple: int = 1

    def __post_init__(self) -> None:
        self._sizes = fitting_lengths(self.lengths, self.capacity)
        self.steps_per_epoch = -(-self._sizes.size // self.samples_per_step)

    def step(self, epoch: int, step: int) -> list[list[Row]]:
        """See `Epochs.step`."""
        _check_step(step, self.steps_per_epoch)
        order = _order(self._sizes.size, self.seed, epoch)
        begin = step * self.samples_per_step
        members = order[begin : begin + self.samples_per_step]
        plan = token_budget(self._sizes[members], self.capacity, self.num_ranks, self.model)
        missing = -len(plan[0]) % self.multiple
        return [named(rank, members.tolist()) + [[] for _ in range(missing)] for rank in plan]


class StepPlan:
    """The micro-batches of a run, step by step through its epochs.

    Args:
        epochs: the rows.
        micro_batch_size: rows of one micro-batch.
        identity: of all that decides which samples a step sees; a layout does not.
    """

    def __init__(self, epochs: Epochs, micro_batch_size: int, identity: str = "") -> None:
        self.identity = identity
        self._epochs = epochs
        self._micro_batch_size = micro_batch_size
        self._last: tuple[int, list[list[Row]]] = (-1, [])

    @property
    def steps_per_epoch(self) -> int:
        return self._epochs.steps_per_epoch

    def _rows(self, step: int) -> list[list[Row]]:
        if self._last[0] != step:
            self._last = step, self._epochs.step(*divmod(step, self.steps_per_epoch))
        return self._last[1]

    def num_microbatches(self, step: int) -> int:
        """Micro-batches of each rank in a step, counted from the beginning of the run."""
        return len(self._rows(step)[0]) // self._micro_batch_size

    def microbatches(self, step: int, rank: int) -> list[list[tuple[int, ...]]]:
        """``[micro-batch][row]`` sample numbers of one data-parallel rank."""
        rows = [tuple(row) for row in self._rows(step)[rank]]
        size = self._micro_batch_size
        return [rows[i : i + size] for i in range(0, len(rows), size)]


class StepSampler(Sampler[list[tuple[int, ...]]]):
    """Micro-batches of one data-parallel rank, from a step on; never ends."""

    def __init__(self, plan: StepPlan, dp_rank: int, first_step: int) -> None:
        self._plan, self._dp_rank, self._step = plan, dp_rank, first_step

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        step = self._step
        while True:
            yield from self._plan.microbatches(step, self._dp_rank)
            step += 1
