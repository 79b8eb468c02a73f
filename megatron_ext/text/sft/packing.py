"""Dynamic packing: which samples share a row, and which rows a data-parallel rank computes.

Everything here is a function of the samples' lengths, in integers and with no communication, so
that all ranks find the same rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import ArrayLike

from megatron_ext.data.samplers import Ints, Row
from megatron_ext.errors import ConfigError, DataError

EVEN_ENOUGH = 1000
"""Rows are swapped no more once the busiest rank is less than 1/1000 above the mean."""


@dataclass(frozen=True)
class CostModel:
    """The compute of a document of L tokens, ``linear * L + quadratic * L**2``.

    It is counted in integers, whose sums depend neither on the order of adding nor on the machine.
    """

    linear: int
    quadratic: int

    @classmethod
    def of_sizes(
        cls,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        num_query_groups: int | None = None,
        kv_channels: int | None = None,
        gated: bool = False,
        num_layers: int = 1,
        vocab_size: int = 0,
    ) -> CostModel:
        """Return the cost in multiply-adds of a forward pass of a transformer.

        A layer takes ``h d (n + 2 g) + n d h`` for attention's projections and ``2 h f`` (gated:
        ``3 h f``) for the MLP per token, and ``n d L`` per token for scores and values, of which
        the causal half is counted; the head takes ``h v`` per token. With ``f = 4 h`` and no head
        that is ``12 h**2 L + h L**2``: attention costs as much as all else at ``L = 12 h``. Source:
        Narayanan et al. 2021 (arXiv:2104.04473), ``1 + s / (6 h) + ...``, which counts full
        attention; the causal half is the count of `flops_per_sample`.

        Args in these letters: hidden_size h, ffn_hidden_size f (with experts the width that one
        token meets, routed and shared), num_attention_heads n, num_query_groups g (default n),
        kv_channels d (default ``h / n``), vocab_size v (0: no head); gated: three MLP matrices.
        """
        d = kv_channels or hidden_size // num_attention_heads
        groups = num_query_groups or num_attention_heads
        projections = 2 * hidden_size * d * (num_attention_heads + groups)
        mlp = (3 if gated else 2) * hidden_size * ffn_hidden_size
        linear = num_layers * (projections + mlp) + hidden_size * vocab_size
        quadratic = num_layers * num_attention_heads * d
        common = gcd(linear, quadratic)  # keeps the sums of long rows far below 2**63
        return cls(linear // common, quadratic // common)

    def of_documents(self, lengths: ArrayLike) -> Ints:
        """Return the cost of each document, ``[n]`` from ``[n]`` tokens."""
        sizes = np.asarray(lengths, dtype=np.int64)
        return sizes * (self.linear + self.quadratic * sizes)


def cost(lengths_in_row: ArrayLike, model: CostModel) -> int:
    """Return the compute of a packed row, whose documents do not attend to each other."""
    return int(model.of_documents(lengths_in_row).sum())


def pack(lengths: ArrayLike, capacity: int) -> list[Row]:
    """Put each sample, longest first, into the first row that has room (first-fit decreasing).

    At most 11/9 of the fewest possible rows plus 6/9 (Dósa 2007). Rows with room for the current
    length are kept in a heap by number; lengths only fall, so that a row re-enters the heap at
    most once per sample: O(n log n).

    Raises:
        DataError: a sample is empty, or longer than a row.
    """
    sizes = fitting_lengths(lengths, capacity)
    order = np.argsort(-sizes, kind="stable").tolist()
    values, counts = np.unique(sizes, return_counts=True)
    rows: list[Row] = []
    space: list[int] = []
    open_rows: list[int] = []
    too_full: dict[int, list[int]] = {}
    begin, previous = 0, capacity
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        for room in range(length, previous):
            for row in too_full.pop(room, ()):
                heapq.heappush(open_rows, row)
        previous, end = length, begin + count
        while begin < end:
            if not open_rows:
                open_rows.append(len(rows))
                rows.append([])
                space.append(capacity)
            row = open_rows[0]
            taken = min(end - begin, space[row] // length)
            rows[row] += order[begin : begin + taken]
            begin += taken
            space[row] -= taken * length
            if space[row] < length:
                heapq.heappop(open_rows)
                too_full.setdefault(space[row], []).append(row)
    return rows


def fitting_lengths(lengths: ArrayLike, capacity: int) -> Ints:
    """Return the lengths ``[n]`` of samples after a check that each fits a row.

    Raises:
        DataError: a sample is empty, or longer than a row.
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
    """Deal the rows of one step to ranks: equally many for each, and about the same cost.

    Costliest first to the cheapest rank that has room (Graham 1969), then swaps between the
    busiest rank and another as long as one lowers the higher of the two. `small_ends` orders the
    rows of all ranks alike, for ranks that meet in every micro-batch (expert parallelism).

    Returns:
        For each rank, positions in ``costs [rows]`` in the order of its micro-batches.

    Raises:
        ConfigError: the rows cannot be dealt equally.
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
    """Deal members, costliest first, to the cheapest of the groups with fewer than ``most``."""
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [(0, group) for group in range(num_groups)]
    for member in np.argsort(-weights, kind="stable").tolist():
        load, group = heapq.heappop(loads)
        groups[group].append(member)
        if len(groups[group]) < most:
            heapq.heappush(loads, (load + int(weights[member]), group))
    return groups


def _swap_rows(ranks: Ints, weights: Ints) -> None:
    """Swap entries of ``ranks [ranks, rows]`` in place; the sum of squared loads always falls."""
    loads = weights[ranks].sum(axis=1)
    mean = int(loads.sum()) // len(loads)
    while True:
        busiest = int(loads.argmax())
        if (int(loads[busiest]) - mean) * EVEN_ENOUGH <= mean:
            return
        moved = weights[ranks[busiest]][:, None, None] - weights[ranks][None]
        higher = np.maximum(loads[busiest] - moved, loads[None, :, None] + moved)
        mine, other, theirs = np.unravel_index(int(higher.argmin()), higher.shape)
        if higher[mine, other, theirs] >= loads[busiest]:
            return
        loads[busiest] -= moved[mine, other, theirs]
        loads[other] += moved[mine, other, theirs]
        here, there = (busiest, mine), (other, theirs)
        ranks[here], ranks[there] = ranks[there], ranks[here]


def small_ends(members: Sequence[int], weights: Ints) -> list[int]:
    """Order micro-batches by cost, cheap ones at both ends, where pipeline stages wait."""
    rising = sorted(members, key=lambda member: (int(weights[member]), member))
    return rising[::2] + rising[1::2][::-1]


def token_budget(
    lengths: ArrayLike, budget: int, num_ranks: int, model: CostModel
) -> list[list[Row]]:
    """Deal the samples of one step to ranks and to micro-batches of at most ``budget`` tokens.

    Samples are dealt to ranks by cost. The rank that needs most micro-batches sets their number,
    and every rank spreads its samples over that many; some are empty where samples do not suffice.

    Returns:
        For each rank, equally many micro-batches of positions in ``lengths``.

    Raises:
        DataError: a sample is empty, or longer than the budget.
    """
    sizes = fitting_lengths(lengths, budget)
    costs = model.of_documents(sizes)
    ranks = _deal(costs, num_ranks, sizes.size + 1)
    packed = [named(pack(sizes[rank], budget), rank) for rank in ranks]
    count = max(len(rows) for rows in packed)
    plan = []
    for rank, rows in zip(ranks, packed, strict=True):
        even = named(_deal(costs[rank], count, len(rank) + 1), rank)
        if any(sizes[row].sum() > budget for row in even):
            even = rows + [[] for _ in range(count - len(rows))]
        weights = np.array([costs[row].sum() for row in even], dtype=np.int64)
        plan.append([even[row] for row in small_ends(range(count), weights)])
    return plan


def named(rows: list[Row], members: Sequence[int]) -> list[Row]:
    """Return rows of positions in ``members`` as rows of the members themselves."""
    return [[members[position] for position in row] for row in rows]
