"""`StepPlan`: the micro-batches of each step, for datasets whose samples determine their number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from torch.utils.data import Sampler

Row = list[int]
"""Dataset indices of the samples in one row of a micro-batch; an empty list is a row of padding."""


class Epochs(Protocol):
    """Tells which samples form the rows of each data-parallel rank in each step of an epoch."""

    steps_per_epoch: int

    def step(self, epoch: int, step: int) -> list[list[Row]]:
        """Return a step's rows, ``[rank][row]``; ``step`` counts from 0 in each epoch."""
        ...


class StepPlan:
    """The samples that form the micro-batches of each step of a run, epoch after epoch.

    Args:
        epochs: gives the rows of each step of an epoch.
        micro_batch_size: rows of one micro-batch.
        identity: digest of everything that determines the samples of a step; the parallel layout is
            not part of it.
        packs_documents: whether a row may hold several documents. Each then has positions from 0,
            and neither attention nor multi-token prediction crosses into the next.
    """

    def __init__(
        self,
        epochs: Epochs,
        micro_batch_size: int,
        identity: str = "",
        *,
        packs_documents: bool = False,
    ) -> None:
        self.identity = identity
        self.packs_documents = packs_documents
        self._epochs = epochs
        self._micro_batch_size = micro_batch_size
        self._last: tuple[int, list[list[Row]]] = (-1, [])

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps in an epoch."""
        return self._epochs.steps_per_epoch

    def _rows(self, step: int) -> list[list[Row]]:
        if self._last[0] != step:
            self._last = step, self._epochs.step(*divmod(step, self.steps_per_epoch))
        return self._last[1]

    def num_microbatches(self, step: int) -> int:
        """Return how many micro-batches each rank has in a step of the run, counted from 0."""
        return len(self._rows(step)[0]) // self._micro_batch_size

    def microbatches(self, step: int, rank: int) -> list[list[tuple[int, ...]]]:
        """Return a data-parallel rank's micro-batches of a step of the run.

        Each micro-batch is a list of rows, and a row is a tuple of sample indices.
        """
        rows = [tuple(row) for row in self._rows(step)[rank]]
        size = self._micro_batch_size
        return [rows[i : i + size] for i in range(0, len(rows), size)]


@dataclass(eq=False)
class StepSampler(Sampler[list[tuple[int, ...]]]):
    """Yields a rank's micro-batches of a `StepPlan`, from ``first_step`` on, without end."""

    plan: StepPlan
    dp_rank: int
    first_step: int

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        for step in count(self.first_step):
            yield from self.plan.microbatches(step, self.dp_rank)
