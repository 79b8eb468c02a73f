"""Mixtures that change during a run: planned stages, resumed runs, and limits on epochs.

A stage is a part of the run with one mixture: the weights of its sources, and a sample length. It
starts at a sample, numbered from the start of the run, and at each of its samples every source has
its share to within one sample (`interleave`). A ramp, in which weights change linearly, is
approximated by up to `STEPS` stages of whole numbers of samples. At the end of each of them, the
number of samples that a source has given since the ramp began differs by less than one from the
integral of its share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from megatron_ext.data.order import SampleOrder, Stage

STEPS = 64
"""Largest number of constant mixtures that approximate a ramp, whose weights change linearly."""

Weights = Mapping[str, Fraction]


@dataclass(frozen=True)
class Planned:
    """A stage of a planned schedule: one mixture of sources, or a ramp that ends in it.

    Attributes:
        weights: weight of each source by name.
        seq_length: tokens of a sample.
        samples, tokens: length of the stage in one of these units; if both are None, the stage
            lasts to the end of the run.
        ramp: whether the weights change linearly, from the previous stage's weights to these.
    """

    weights: Weights
    seq_length: int
    samples: int | None = None
    tokens: int | None = None
    ramp: bool = False

    @property
    def size(self) -> int | None:
        """Return the stage's length in samples, rounded up if given in tokens; None if open."""
        if self.samples is not None or self.tokens is None:
            return self.samples
        return -(-self.tokens // self.seq_length)


def stages_of(planned: Sequence[Planned], begin: int = 0, batch: int = 1) -> list[Stage]:
    """Return the mixtures of the schedule ``planned``, each with the sample at which it starts.

    The sample length can only change between steps: a stage with another length starts with the
    first step that begins at or after the planned sample, and later stages are delayed by as many
    samples. Steps begin at the samples ``begin``, ``begin + batch``, ``begin + 2 * batch`` etc.
    """
    stages: list[Stage] = []
    number = 0
    before = planned[0]
    for each in planned:
        if each.seq_length != before.seq_length:
            number += (begin - number) % batch
        if each.ramp and each.size:
            stages += _staircase(before.weights, each, number)
        else:
            stages.append(Stage(number, each.seq_length, each.weights))
        number = number + (each.size or 0)
        before = each
    return stages


def _staircase(old: Weights, ramp: Planned, start: int) -> list[Stage]:
    size = ramp.size or 0
    first = shares(old)
    last = shares(ramp.weights)
    names = list(dict.fromkeys([*first, *last]))
    edges = [size * step // STEPS for step in range(STEPS + 1)]
    done = dict.fromkeys(names, 0)
    stages = []
    for begin, end in zip(edges, edges[1:], strict=False):
        if begin == end:
            continue
        amounts = {}
        for name in names:
            slope = (last.get(name, Fraction(0)) - first.get(name, Fraction(0))) / size
            integral = first.get(name, Fraction(0)) * end + slope * end * end / 2
            amounts[name] = max(integral - done[name], Fraction(0))
        counts = _apportioned(amounts, end - begin)
        done = {name: done[name] + counts[name] for name in names}
        weights = {name: Fraction(count) for name, count in counts.items() if count}
        stages.append(Stage(start + begin, ramp.seq_length, weights))
    return stages


def shares(weights: Weights) -> dict[str, Fraction]:
    """Return the weights divided by their sum."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _apportioned(amounts: Mapping[str, Fraction], total: int) -> dict[str, int]:
    """Scale ``amounts`` to the sum ``total`` and round them by the method of largest remainders."""
    scale = Fraction(total) / sum(amounts.values())
    exact = {name: value * scale for name, value in amounts.items()}
    counts = {name: math.floor(value) for name, value in exact.items()}
    most = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in most[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def continued(history: Sequence[Stage], plan: Sequence[Stage], number: int) -> list[Stage]:
    """Return the stages of a run that follows ``history``, and ``plan`` from sample ``number`` on.

    Stages of ``history`` that start before ``number``, and those of ``plan`` that start after it,
    are kept. Between them, the stage that covers ``number`` in ``plan`` starts at ``number``. But
    if it starts earlier in ``plan``, and has the sample length and the shares of the last stage
    kept from ``history``, that one continues instead.
    """
    if not history or number == 0:
        return list(plan)
    past = [stage for stage in history if stage.start < number]
    now = [stage for stage in plan if stage.start <= number][-1]
    stages = list(past)
    if now.start == number or not past[-1].goes_on_as(now):
        stages.append(replace(now, start=number))
    return stages + [stage for stage in plan if stage.start > number]


@dataclass(frozen=True)
class Exhausted:
    """A source that reaches its limit of epochs: it gives no sample from ``number`` on."""

    name: str
    number: int


def limited(
    order: SampleOrder, limits: Mapping[str, Fraction], total: int, *, stops: bool
) -> tuple[SampleOrder, int, list[Exhausted]]:
    """Return an order that reads each source at most for a given number of epochs.

    Also return the number of samples after which the order ends, and the exhausted sources.

    Args:
        limits: the most epochs, by name of source.
        total: samples of the run.
        stops: whether the order ends where the first source is exhausted; otherwise the other
            sources take over its share, and the order only ends there if a stage had no other
            source.
    """
    exhausted: list[Exhausted] = []
    tokens = {source.name: source.tokens for source in order.sources}
    while True:
        left = {name: limits[name] * tokens[name] for name in limits if name in tokens}
        ends = [
            Exhausted(name, _last_within(order, name, budget, total))
            for name, budget in left.items()
            if not any(each.name == name for each in exhausted)
        ]
        first = min(ends, key=lambda each: each.number, default=None)
        if first is None or first.number >= total:
            return order, total, exhausted
        exhausted.append(first)
        stages = _without(order.stages, {first.name}, first.number)
        if stops or stages is None:
            return order, first.number, exhausted
        order = order.with_stages(stages)


def _last_within(order: SampleOrder, name: str, budget: Fraction, total: int) -> int:
    """Return how many samples of ``order`` can be read within a budget of tokens of one source.

    The result is the largest n, up to ``total``, for which the first n samples of the run use at
    most ``budget`` tokens of the source ``name``.
    """
    low = 0
    high = total
    while low < high:
        middle = (low + high + 1) // 2
        if order.tokens_used(middle)[name] <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _without(stages: Sequence[Stage], names: Collection[str], number: int) -> list[Stage] | None:
    """Return the stages without the sources ``names`` from sample ``number`` on.

    The result is None if that leaves a stage without any source.
    """
    remaining = [stage for stage in stages if stage.start < number]
    now = [stage for stage in stages if stage.start <= number][-1]
    for stage in (replace(now, start=number), *(s for s in stages if s.start > number)):
        weights = {name: w for name, w in stage.weights.items() if name not in names and w}
        if not weights:
            return None
        remaining.append(replace(stage, weights=weights))
    return remaining
