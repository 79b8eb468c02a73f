"""The rows of conversations that a data-parallel rank computes in each step of each epoch.

Everything here is a function of the conversations' lengths and of ``(seed, epoch, step)``, with no
communication, so that all ranks find the same rows and a run resumes at any step.

An epoch is exact: every conversation is seen once. Its last step may be short, and is filled with
empty rows (``[]``), which weigh nothing in the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron_ext.data.samplers import Ints, Row, shuffled
from megatron_ext.errors import DataError
from megatron_ext.text.sft.packing import (
    CostModel,
    balance,
    cost,
    fitting_lengths,
    named,
    pack,
    token_budget,
)


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
    """Rows that several conversations share.

    Every epoch is packed anew with samples of equal length exchanged (the number of rows stays),
    and its rows are shuffled by ``seed``; the row that packing could not fill comes last. Without
    a seed all epochs are the same, in the order of packing. A rank with fewer than eight rows in a
    step may have too few to swap for an even share of the work.

    Attributes:
        lengths: tokens of each sample, ``[n]``.
        capacity: tokens of a row.
        rows_per_step: global batch size, a multiple of ``num_ranks``, the data-parallel size.

    Raises:
        DataError: a sample is empty, or longer than a row.
    """

    lengths: ArrayLike
    capacity: int
    rows_per_step: int
    num_ranks: int
    model: CostModel
    seed: int | None

    def __post_init__(self) -> None:
        self._sizes = fitting_lengths(self.lengths, self.capacity)
        self._load(0)
        self.steps_per_epoch = -(-len(self._rows) // self.rows_per_step)

    def step(self, epoch: int, step: int) -> list[list[Row]]:
        """Return the rows ``[rank][row]`` of a step, counted within its epoch.

        Raises:
            ConfigError: the rows cannot be dealt equally.
            DataError: the epoch has fewer steps.
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
        whole = max(0, len(rows) - 1)
        order = _order(whole, self.seed, epoch, 1)
        self._rows = [rows[row] for row in order.tolist()] + rows[whole:]
        self._epoch = epoch


@dataclass
class PaddedEpochs:
    """Rows of one conversation each; the rows of a step are dealt to the ranks in turn.

    Attributes:
        num_samples: conversations of the split.
        rows_per_step: global batch size, a multiple of ``num_ranks * micro_batch_size``.
        num_ranks: data-parallel size.
        micro_batch_size: rows that a rank takes at each turn.
        seed: decides the order, anew in each epoch; None keeps the order of the split.
    """

    num_samples: int
    rows_per_step: int
    num_ranks: int
    micro_batch_size: int
    seed: int | None

    def __post_init__(self) -> None:
        self.steps_per_epoch = -(-self.num_samples // self.rows_per_step)

    def step(self, epoch: int, step: int) -> list[list[Row]]:
        """Return the rows ``[rank][row]`` of a step, counted within its epoch."""
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
    """Steps of as many rows as their conversations need; see `token_budget`.

    Attributes:
        lengths: tokens of each sample, ``[n]``.
        capacity: tokens of a row.
        samples_per_step: global batch size.
        num_ranks: data-parallel size.
        seed: decides the order, anew in each epoch; None keeps the order of the split.
        multiple: the rows of a rank are filled up to a multiple of this with empty ones.

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
        """Return the rows ``[rank][row]`` of a step, counted within its epoch."""
        _check_step(step, self.steps_per_epoch)
        order = _order(self._sizes.size, self.seed, epoch)
        begin = step * self.samples_per_step
        members = order[begin : begin + self.samples_per_step]
        plan = token_budget(self._sizes[members], self.capacity, self.num_ranks, self.model)
        missing = -len(plan[0]) % self.multiple
        return [named(rank, members.tolist()) + [[] for _ in range(missing)] for rank in plan]
