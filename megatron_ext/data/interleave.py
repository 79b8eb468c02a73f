"""Deterministic interleaving of sources by exact weights.

A mixture is a sequence of samples; place n (n = 0, 1, ...) is a position in it. Let w_i be the
share of source i. A schedule assigns each place to a source, such that the number of samples of
source i among the first n places differs from n * w_i by less than one, for every n. This is the
"pfair" schedule of one processor (Baruah, Cohen, Plaxton and Varvel 1996). Sample j of source i may
take the places from floor(j / w_i) to ceil((j + 1) / w_i) - 1, its deadline, which keeps the
difference below one. Each place goes to the sample with the earliest deadline. A valid schedule
always exists, and this rule finds it. Weights are exact fractions, so nothing is rounded however
large n is.

Any place can be looked up without computing all places before it. Start two such schedules at the
same place n with different counts, all within one sample of n * w_i. They agree as soon as every
sample that was waiting at the start has met its deadline: after 2 / w places, with w the smallest
share. Hence it is enough to start 2 / w places before the requested place, from any such counts
with which all deadlines can be met.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.permutation import Ints

BLOCK = 1024
"""Number of consecutive places of a mixture that are scheduled at once and cached as a block."""
_BLOCKS_KEPT = 64
_CYCLE = 16 * BLOCK
"""Most places in a cycle: as many periods of the schedule as fit, computed as one repeating unit.

A period that is longer than this is a cycle of its own.
"""

Places = NDArray[np.uint16]


class Interleave:
    """A schedule that assigns each place 0, 1, ... of a mixture with constant weights to a source.

    A place is a position in the sequence of the mixture's samples. The schedule repeats after
    ``period`` places.

    Args:
        weights: weights of the sources, at least 0 and not all 0; only their ratios matter.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        scale = math.lcm(*(weight.denominator for weight in weights))
        whole = [int(weight * scale) for weight in weights]
        common = math.gcd(*whole)
        self._shares = [each // common for each in whole]
        self._present = [i for i, share in enumerate(self._shares) if share]
        self.period = sum(self._shares)
        # A short period is repeated several times in a cycle, so that a block holds many places.
        repeats = max(1, _CYCLE // self.period)
        self._cycle = repeats * self.period
        self._per_cycle = [repeats * x for x in self._shares]
        self._blocks: OrderedDict[int, tuple[Places, list[int], list[int]]] = OrderedDict()

    def counts(self, place: int) -> list[int]:
        """Return how many of the places 0 to ``place`` - 1 belong to each source."""
        rounds, rest = divmod(place, self._cycle)
        if not rest:
            return [rounds * share for share in self._per_cycle]
        _, counts, _ = self._block(rest // BLOCK)
        if rest % BLOCK:
            sources, _, _ = self._block(rest // BLOCK)
            extra = np.bincount(sources[: rest % BLOCK], minlength=len(counts))
            counts = [a + int(b) for a, b in zip(counts, extra, strict=True)]
        return [rounds * share + c for share, c in zip(self._per_cycle, counts, strict=True)]

    def places(self, start: int, stop: int) -> tuple[Places, Ints]:
        """Return the samples at places ``start`` to ``stop`` - 1 of the mixture.

        The first array ``[stop - start]`` has the source of each sample, the second the number of
        the sample among all samples of its source, counted from 0.
        """
        parts = []
        place = start
        while place < stop:
            rest = place % self._cycle
            sources, _, _ = self._block(rest // BLOCK)
            part = sources[rest % BLOCK : rest % BLOCK + stop - place]
            parts.append(part)
            place += len(part)
        sources = np.concatenate(parts) if len(parts) != 1 else parts[0]
        return sources, numbered(sources, self.counts(start))

    def place_of(self, source: int, number: int) -> int:
        """Return the place in the mixture of a source's sample ``number``, both counted from 0."""
        share = self._shares[source]
        first = number * self.period // share
        sources, numbers = self.places(first, -(-(number + 1) * self.period // share))
        return first + int(np.flatnonzero((sources == source) & (numbers == number))[0])

    def _block(self, number: int) -> tuple[Places, list[int], list[int]]:
        """Return block ``number`` (`BLOCK` places) of the cycle after which the schedule repeats.

        Returns:
            The source of each place in the block, and two lists with the number of samples of each
            source from the beginning of the cycle: up to the block's first place, and up to the
            block's end.
        """
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        start = number * BLOCK
        stop = min((number + 1) * BLOCK, self._cycle)
        counts = self._counts_before(start)
        sources, after = self._schedule(counts, start, stop)
        self._blocks[number] = np.array(sources, dtype=np.uint16), counts, after
        if len(self._blocks) > _BLOCKS_KEPT:
            self._blocks.popitem(last=False)
        return self._blocks[number]

    def _counts_before(self, place: int) -> list[int]:
        """Return how many samples each source has from the cycle's start up to before ``place``.

        The schedule is computed up to ``place``: from the end of the last cached block if that is
        near enough, otherwise from about 2 / w places earlier, where w is the smallest share. To
        start at a place s, each source gets its share times s, rounded down, as its count. If the
        counts do not add up to s, the sources with the next deadlines get one sample more, so that
        all deadlines are met.
        """
        least = min(self._shares[i] for i in self._present)
        start = place - 2 * -(-self.period // least) - 1
        before = max((number for number in self._blocks if number < place // BLOCK), default=-1)
        after_block = (before + 1) * BLOCK
        if before >= 0 and after_block >= start:
            return self._schedule(self._blocks[before][2], after_block, place)[1]
        if start <= 0:
            return self._schedule([0] * len(self._shares), 0, place)[1]
        counts = [start * share // self.period for share in self._shares]
        waiting = [
            (Fraction((counts[i] + 1) * self.period, self._shares[i]), i)
            for i in self._present
            if start * self._shares[i] % self.period
        ]
        for _, source in sorted(waiting)[: start - sum(counts)]:
            counts[source] += 1
        return self._schedule(counts, start, place)[1]

    def _schedule(self, counts: list[int], start: int, stop: int) -> tuple[list[int], list[int]]:
        """Schedule places ``start`` to ``stop`` - 1.

        Args:
            counts: number of samples of each source before place ``start``.

        Returns:
            The source of each place, and the number of samples of each source before place
            ``stop``.
        """
        period = self.period
        shares = self._shares
        counts = list(counts)
        if len(self._present) == 1:
            only = self._present[0]
            counts[only] += stop - start
            return [only] * (stop - start), counts
        coming = [(counts[i] * period // shares[i], i) for i in self._present]
        heapq.heapify(coming)
        ready: list[tuple[int, int]] = []
        sources = []
        for place in range(start, stop):
            while coming and coming[0][0] <= place:
                _, i = heapq.heappop(coming)
                heapq.heappush(ready, (-(-(counts[i] + 1) * period // shares[i]), i))
            _, i = heapq.heappop(ready)
            sources.append(i)
            counts[i] += 1
            heapq.heappush(coming, (counts[i] * period // shares[i], i))
        return sources, counts


def numbered(sources: Places, counts: Sequence[int]) -> Ints:
    """Return the number of each sample within its own source, counted from 0.

    Args:
        sources: sources of the samples at consecutive places of a mixture.
        counts: number of samples of each source before the first of these places.
    """
    order = np.argsort(sources, kind="stable")
    sizes = np.bincount(sources, minlength=len(counts))
    firsts = np.cumsum(sizes) - sizes
    within = np.arange(len(sources), dtype=np.int64) - np.repeat(firsts, sizes)
    numbers = np.empty(len(sources), dtype=np.int64)
    numbers[order] = within + np.repeat(np.asarray(counts, dtype=np.int64), sizes)
    return numbers


def error_of(weights: Sequence[Fraction], counts: Sequence[int]) -> Fraction:
    """Return the largest absolute difference between a source's sample count and its quota.

    The quota of a source is its share of ``weights`` times the sum of ``counts``, not rounded.
    """
    places = sum(counts)
    total = sum(weights)
    quotas = (places * weight / total for weight in weights)
    return max(abs(quota - count) for quota, count in zip(quotas, counts, strict=True))
