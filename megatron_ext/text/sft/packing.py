"""Dynamic packing: decides which samples share a row, and which rows each data-parallel rank gets.

Everything is computed from the samples' lengths and ``(seed, epoch, step)``, in integers and
without communication. All ranks therefore compute the same rows, and a run can resume at any step.

In an epoch every conversation is used exactly once. If the last step of an epoch has too few rows,
it is filled with empty rows (``[]``), whose loss weight is 0.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike

from megatron_ext.data.samplers import Ints, shuffled
from megatron_ext.data.step_plan import Row
from megatron_ext.errors import ConfigError, DataError

EVEN_ENOUGH = 1000
"""Rows are no longer swapped once the costliest rank is at most 1/1000 above the mean cost."""


@dataclass(frozen=True)
class CostModel:
    """Computes the relative cost of a forward pass of a document of L tokens, as an integer.

    The cost is ``linear * L + quadratic * L**2``; only ratios of costs matter.
    """

    linear: int
    quadratic: int

    def of_documents(self, lengths: ArrayLike) -> Ints:
        """Return the cost of each document ``[n]``, given the numbers of tokens ``[n]``."""
        sizes = np.asarray(lengths, dtype=np.int64)
        return sizes * (self.linear + self.quadratic * sizes)


def cost(lengths_in_row: ArrayLike, model: CostModel) -> int:
    """Return the cost of a packed row, whose documents do not attend to each other.

    ``lengths_in_row`` are the numbers of tokens of the documents.
    """
    return int(model.of_documents(lengths_in_row).sum())


def pack(lengths: ArrayLike, capacity: int) -> list[Row]:
    """Put each sample, longest first, into the first row that has room (first-fit decreasing).

    Return the rows, each a list of indices in ``lengths``; a row has room for ``capacity`` tokens.

    The number of rows is at most 11/9 of the optimum plus 6/9 (Dósa 2007). A heap holds the indices
    of the rows with room for the current length. Since lengths only decrease, a row re-enters the
    heap at most once per sample, which takes O(n log n).
    """
    sizes = fitting_lengths(lengths, capacity)
    order = np.argsort(-sizes, kind="stable").tolist()
    values, counts = np.unique(sizes, return_counts=True)
    rows: list[Row] = []
    space: list[int] = []
    open_rows: list[int] = []
    too_full: dict[int, list[int]] = {}
    begin = 0
    previous = capacity
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        # Rows whose space was too small for the previous length may have room for this one.
        for room in range(length, previous):
            for row in too_full.pop(room, ()):
                heapq.heappush(open_rows, row)
        previous = length
        end = begin + count
        while begin < end:
            if not open_rows:
                open_rows.append(len(rows))
                rows.append([])
                space.append(capacity)
            row = open_rows[0]
            # First-fit puts samples of equal length into one row until it is full: do so at once.
            taken = min(end - begin, space[row] // length)
            rows[row] += order[begin : begin + taken]
            begin += taken
            space[row] -= taken * length
            if space[row] < length:
                heapq.heappop(open_rows)
                too_full.setdefault(space[row], []).append(row)
    return rows


def fitting_lengths(lengths: ArrayLike, capacity: int) -> Ints:
    """Return ``lengths`` as an array ``[n]``.

    Raise a DataError if a sample is empty or longer than ``capacity``.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and sizes.max() > capacity:
        raise DataError(
            f"Sample {sizes.argmax()} has {sizes.max()} tokens, but a packed row holds {capacity}; "
            "cut long samples before packing, or raise `--seq-length`."
        )
    if sizes.size and sizes.min() < 1:
        raise DataError(
            f"Sample {sizes.argmin()} has {sizes.min()} tokens, but a packed sample needs at least "
            "1; drop empty samples before packing."
        )
    return sizes


def balance(costs: ArrayLike, num_ranks: int) -> list[list[int]]:
    """Assign the rows of one step to ranks: equally many per rank, at about the same cost.

    Each row, costliest first, goes to the cheapest rank that has room (Graham 1969). Then the
    busiest rank swaps rows with others until its cost is near the mean, or no swap helps. All ranks
    put their cheap rows first and last (`small_ends`), since expert parallelism synchronizes ranks
    in every micro-batch.

    Return, for each rank, the indices of its rows in ``costs [rows]``, in the order of
    micro-batches. Raise a ConfigError if the number of rows is not a multiple of ``num_ranks``.
    """
    weights = np.asarray(costs, dtype=np.int64)
    if weights.size % num_ranks or not weights.size:
        raise ConfigError(
            f"The rows of a step ({weights.size}) must be a positive multiple of the data-parallel "
            f"size ({num_ranks}); change `--global-batch-size`."
        )
    ranks = np.array(_deal(weights, num_ranks, weights.size // num_ranks), dtype=np.int64)
    _swap_rows(ranks, weights)
    return [small_ends(rank, weights) for rank in ranks.tolist()]


def _deal(weights: Ints, num_groups: int, most: int) -> list[list[int]]:
    """Assign indices to groups: each, costliest first, to the cheapest group that has room.

    ``weights`` are the costs of the indices; a group has room for ``most`` indices.
    """
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [(0, group) for group in range(num_groups)]
    for member in np.argsort(-weights, kind="stable").tolist():
        load, group = heapq.heappop(loads)
        groups[group].append(member)
        if len(groups[group]) < most:
            heapq.heappush(loads, (load + int(weights[member]), group))
    return groups


def _swap_rows(ranks: Ints, weights: Ints) -> None:
    """Swap rows between ranks until the busiest rank is near the mean cost, or no swap helps.

    ``ranks [ranks, rows]`` holds the row indices of each rank, and is changed in place. ``weights``
    are the costs of the rows.
    """
    loads = weights[ranks].sum(axis=1)
    mean = int(loads.sum()) // len(loads)
    while True:
        busiest = int(loads.argmax())
        if (int(loads[busiest]) - mean) * EVEN_ENOUGH <= mean:
            return
        # For each row of the busiest rank and each row of any rank: the load that a swap moves from
        # the busiest rank, and the higher of the two loads after it.
        moved = weights[ranks[busiest]][:, None, None] - weights[ranks][None]
        higher = np.maximum(loads[busiest] - moved, loads[None, :, None] + moved)
        mine, other, theirs = np.unravel_index(int(higher.argmin()), higher.shape)
        if higher[mine, other, theirs] >= loads[busiest]:
            return
        loads[busiest] -= moved[mine, other, theirs]
        loads[other] += moved[mine, other, theirs]
        here = (busiest, mine)
        there = (other, theirs)
        ranks[here], ranks[there] = ranks[there], ranks[here]


def small_ends(members: Sequence[int], weights: Ints) -> list[int]:
    """Order the micro-batches ``members`` so that the cheap ones come first and last.

    In a pipeline the first and last micro-batches of a step keep other stages waiting. ``weights``
    holds the cost of each micro-batch by its index.
    """
    rising = sorted(members, key=lambda member: (int(weights[member]), member))
    return rising[::2] + rising[1::2][::-1]


def token_budget(
    lengths: ArrayLike, budget: int, num_ranks: int, model: CostModel
) -> list[list[Row]]:
    """Assign the samples of one step to ranks, and to micro-batches of at most ``budget`` tokens.

    Each rank gets about the same cost by ``model``. The rank that needs the most micro-batches sets
    their number for all ranks; the others spread their samples over as many, of which some may stay
    empty. Return the micro-batches of each rank, each a list of indices in ``lengths``.
    """
    sizes = fitting_lengths(lengths, budget)
    costs = model.of_documents(sizes)
    ranks = _deal(costs, num_ranks, sizes.size + 1)
    packed = [named(pack(sizes[rank], budget), rank) for rank in ranks]
    count = max(len(rows) for rows in packed)
    plan = []
    for rank, rows in zip(ranks, packed, strict=True):
        # Prefer micro-batches of equal cost. If one would exceed the budget, take the packed rows.
        even = named(_deal(costs[rank], count, len(rank) + 1), rank)
        if any(sizes[row].sum() > budget for row in even):
            even = _filled(rows, count)
        weights = np.array([costs[row].sum() for row in even], dtype=np.int64)
        plan.append([even[row] for row in small_ends(range(count), weights)])
    return plan


def named(rows: list[Row], members: Sequence[int]) -> list[Row]:
    """Return a copy of ``rows``, with each index i replaced by the sample number ``members[i]``."""
    return [[members[position] for position in row] for row in rows]


def _order(count: int, seed: int | None, *seeds: int) -> Ints:
    return np.arange(count) if seed is None else shuffled(count, seed, *seeds)


def _filled(rows: list[Row], count: int) -> list[Row]:
    return rows + [[] for _ in range(count - len(rows))]


@dataclass
class PackedEpochs:
    """Plans steps of ``rows_per_step`` rows, each with conversations of up to ``capacity`` tokens.

    ``step(epoch, step)`` returns the rows of each rank. ``seed`` shuffles each epoch differently:
    samples of equal length change places, then the rows are shuffled. The number of rows stays the
    same, and the row that packing opened last, which may be short, stays last. If ``seed`` is None,
    all epochs are equal, in the order of packing. If a rank has fewer than eight rows in a step,
    the costs of the ranks may stay uneven.
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
        if epoch != self._epoch:
            self._load(epoch)
        begin = step * self.rows_per_step
        rows = _filled(self._rows[begin : begin + self.rows_per_step], self.rows_per_step)
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
    """Plans steps of ``rows_per_step`` rows with one conversation each.

    ``step(epoch, step)`` returns the rows of each rank. The rows of a step are dealt to the ranks
    in turn, ``micro_batch_size`` rows at a time. ``seed`` shuffles the conversations differently in
    each epoch; without it they keep their order.
    """

    num_samples: int
    rows_per_step: int
    num_ranks: int
    micro_batch_size: int
    seed: int | None

    def __post_init__(self) -> None:
        self.steps_per_epoch = -(-self.num_samples // self.rows_per_step)

    def step(self, epoch: int, step: int) -> list[list[Row]]:
        order = _order(self.num_samples, self.seed, epoch)
        begin = step * self.rows_per_step
        members = order[begin : begin + self.rows_per_step].tolist()
        rows = _filled([[sample] for sample in members], self.rows_per_step)
        size = self.micro_batch_size
        turns = [rows[i : i + size] for i in range(0, self.rows_per_step, size)]
        return [list(chain(*turns[rank :: self.num_ranks])) for rank in range(self.num_ranks)]


@dataclass
class BudgetEpochs(PackedEpochs):
    """Plans steps of a fixed number of conversations, packed into as many rows as they need.

    Here ``rows_per_step`` counts conversations, not rows; ``capacity`` is the most tokens of a row.
    ``seed`` shuffles the conversations in each epoch. Each rank gets empty rows until its number of
    rows is divisible by ``multiple``, as the interleaved pipeline schedule requires.
    """

    multiple: int = 1

    def __post_init__(self) -> None:
        self._sizes = fitting_lengths(self.lengths, self.capacity)
        self.steps_per_epoch = -(-self._sizes.size // self.rows_per_step)

    def step(self, epoch: int, step: int) -> list[list[Row]]:
        order = _order(self._sizes.size, self.seed, epoch)
        members = order[step * self.rows_per_step : (step + 1) * self.rows_per_step]
        plan = token_budget(self._sizes[members], self.capacity, self.num_ranks, self.model)
        rows = -(-len(plan[0]) // self.multiple) * self.multiple
        return [_filled(named(rank, members.tolist()), rows) for rank in plan]
