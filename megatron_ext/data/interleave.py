"""Deterministic interleaving of sources by exact weights.

A mixture is a sequence of samples; place n (n = 0, 1, ...) is a position in it. Let w_i be the
share of source i. A schedule assigns each place to a source, such that the number of samples of
source i among the first n places differs from n * w_i by less than one, for every n. This is the
"pfair" schedule of one processor (Baruah, Cohen, Plaxton and Varvel 1996). Sample j of source i may
take the places from floor(j / w_i), its release, to ceil((j + 1) / w_i) - 1, its deadline, which
keeps the difference below one. Each place goes to the released sample with the earliest deadline. A
valid schedule always exists, and this rule finds it. Weights are exact fractions, so nothing is
rounded however large n is.

Any place n can be looked up without scheduling all places before it. Each source has at most one
sample that is released before n and has its deadline at n or later; all samples before it are
scheduled, and it either is, too, or is pending. The number of pending samples is the backlog.
Before place s it is sum_i ceil(s * w_i) - s, in whichever order samples are scheduled. Hence, of
the samples that are pending at n, at most as many as the backlog before s were released before s.
As the earliest deadlines go first, the pending samples at n are those with the latest deadlines
that all these limits allow. A limit matters only if it is lower than that of every later s, and
lower than the number of samples in question that are released before s. `_lows` finds these places
by adding up the releases at each place, which numpy does in nanoseconds, and skips ranges in which
the backlog cannot be so low. Within a period the backlog is at least 1, so where a single sample is
in question, however long ago it was released, nothing is searched. Otherwise the search goes back
to the second earliest release, at most 1 / w places with w the second smallest share.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

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
_SCANNED = 1 << 18
"""Number of places whose backlog is computed at once, unless there are very many sources."""

Places = NDArray[np.unsignedinteger[Any]]
"""The sources of places: in 16 bits if there are at most 65,536 sources, otherwise in 32."""


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
        self._dtype = np.uint16 if len(weights) <= 1 << 16 else np.uint32
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
        last = -(-(number + 1) * self.period // share) - 1
        places = range(first, last)
        return first + bisect.bisect_right(places, number, key=lambda n: self.counts(n + 1)[source])

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
        self._blocks[number] = np.array(sources, dtype=self._dtype), counts, after
        if len(self._blocks) > _BLOCKS_KEPT:
            self._blocks.popitem(last=False)
        return self._blocks[number]

    def _counts_before(self, place: int) -> list[int]:
        """Return how many samples each source has from the cycle's start up to before ``place``."""
        before = max((number for number in self._blocks if number < place // BLOCK), default=-1)
        start = (before + 1) * BLOCK
        known = self._blocks[before][2] if before >= 0 else [0] * len(self._shares)
        return known if start == place else self._counts_after(known, start, place)

    def _counts_after(self, known: list[int], start: int, place: int) -> list[int]:
        """Return how many samples each source has before ``place``.

        ``known`` are the counts before ``start``, an earlier place.
        """
        period = self.period
        shares = self._shares
        counts = [place * share // period for share in shares]
        undecided = []
        for i in self._present:
            if counts[i] < known[i]:
                counts[i] += 1  # The sample was scheduled before ``start``.
            elif place * shares[i] % period:
                deadline = -(-(counts[i] + 1) * period // shares[i])
                undecided.append((counts[i] * period // shares[i], deadline, i))
        if not undecided:
            return counts
        undecided.sort()
        pending: list[tuple[int, int]] = []
        released = 0
        for low, backlog in reversed(list(self._lows(max(start, undecided[0][0]) + 1, place))):
            while released < len(undecided) and undecided[released][0] < low:
                heapq.heappush(pending, undecided[released][1:])
                released += 1
            while len(pending) > backlog:
                _, i = heapq.heappop(pending)
                counts[i] += 1
        return counts

    def _lows(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the places from ``start`` to ``stop`` with a lower backlog than all later ones.

        They come with their backlogs, in descending order; the first is ``stop``. Places may be
        left out if their backlog is not lower than the number of samples that may be pending at
        ``stop`` and are released before the place.
        """
        period = self.period
        last = sorted(
            (stop * share // period * period // share, stop * share // period + 1, share)
            for share in self._shares
            if stop * share % period
        )
        releases = [release for release, _, _ in last]
        counts = list(accumulate((count for _, count, _ in last), initial=0))
        shares = list(accumulate((share for _, _, share in last), initial=0))
        least = self._backlog(stop)
        yield stop, least
        size = max(BLOCK, 4 * len(last))
        while start < stop:
            # The sources that release nothing from here to the end contribute to the backlog their
            # samples, less their shares of the places: more, the earlier the place. The others
            # contribute 0 at least.
            passed = bisect.bisect_left(releases, stop - 1)
            bound = -(-(counts[passed] * period - (stop - 1) * shares[passed]) // period)
            if min(least, passed) <= max(bound, 1):
                stop = releases[passed - 1] + 1 if passed else start
                continue
            begin = max(start, stop - size)
            backlogs = self._backlogs(begin, stop)[::-1]
            before = np.minimum.accumulate(np.concatenate([[least], backlogs]))
            for index in np.flatnonzero(backlogs < before[:-1]).tolist():
                yield stop - 1 - index, int(backlogs[index])
            least = int(before[-1])
            stop = begin
            size = max(size, min(2 * size, _SCANNED))

    def _backlog(self, place: int) -> int:
        """Return how many samples are released, but not scheduled, before ``place``."""
        period = self.period
        return sum(-(-place * self._shares[i] // period) for i in self._present) - place

    def _backlogs(self, start: int, stop: int) -> Ints:
        """Return the backlogs (see `_backlog`) before each place from ``start`` to ``stop`` - 1."""
        releases = np.concatenate([self._releases(i, start, stop) for i in self._present])
        steps = np.bincount(releases, minlength=stop - start) - 1
        backlogs: Ints = self._backlog(start) + np.cumsum(steps) - steps
        return backlogs

    def _releases(self, source: int, start: int, stop: int) -> Ints:
        """Return at which of the places ``start`` to ``stop`` - 1 samples of a source are released.

        The places are counted from ``start``.
        """
        share = self._shares[source]
        period = self.period
        first = -(-start * share // period)
        count = -(-stop * share // period) - first
        offset = first * period - start * share
        # The quotients below are the same with the common divisor taken out.
        common = math.gcd(period, share)
        offset //= common
        period //= common
        share //= common
        if count < 4:
            return np.array([(offset + j * period) // share for j in range(count)], np.int64)
        numbers = np.arange(count, dtype=np.int64)
        if offset + count * period < 1 << 63:
            return (numbers * period + offset) // share
        exact = numbers * (period / share) + offset / share
        places: Ints = np.floor(exact).astype(np.int64)
        # So near to an integer the rounded quotient may lie on its other side. The error is below
        # 1e-8, since the quotients are below a few millions.
        for j in np.flatnonzero(np.abs(exact - np.rint(exact)) < 1e-6).tolist():
            places[j] = (offset + j * period) // share
        return places

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
