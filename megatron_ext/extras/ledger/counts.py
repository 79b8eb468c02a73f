"""Counts from a `Ledger`: a run's samples and epochs by source, and the samples two runs share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from megatron_ext.data.order import SampleOrder
from megatron_ext.data.packed_order import PackedOrder
from megatron_ext.data.windows import Phase
from megatron_ext.errors import ConfigError
from megatron_ext.extras.ledger.ledger import Ledger
from megatron_ext.extras.ledger.step_record import History, Steps

Range = tuple[int, int]


@dataclass
class Use:
    """The samples of one source that a run used in one stage, with one mixture and sample length.

    Attributes:
        stage: number in the run of the stage's first sample.
        tokens: tokens in the source's training split.
        counted: number of samples in steps whose updates are part of the weights.
        others: number of samples in all other steps, by their `Steps.reason`, such as "rewound".
    """

    stage: int
    seq_length: int
    source: str
    tokens: int
    counted: int = 0
    others: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def epochs(self) -> float:
        return self.counted * self.seq_length / self.tokens


def uses(ledger: Ledger) -> list[Use]:
    """Return one `Use` for each stage and source of a run.

    A new stage begins when the mixture or the sample length changes. Steps whose order of samples
    is unknown are left out.
    """
    totals: dict[tuple[int, int, str, str], Use] = {}
    for each in ledger.steps(with_lost=True):
        if each.order is None:
            continue
        order = ledger.order_of(each)
        for taken in order.taken(each.sample, each.stop):
            stage = order.stages[taken.stage]
            source = order.sources[taken.source]
            name = ledger.name_of(source)
            weights = str([str(w) for w in stage.weights.values()])
            key = stage.start, stage.seq_length, weights, name
            new = Use(stage.start, stage.seq_length, name, source.tokens)
            use = totals.setdefault(key, new)
            if each.reason is None:
                use.counted += taken.end - taken.first
            else:
                use.others[each.reason] += taken.end - taken.first
    return sorted(totals.values(), key=lambda use: use.stage)


Same = tuple[int, int, int]
"""A tuple that identifies a source in several runs, wherever its data is stored: (`Source.key`, its
number of tokens, number of sources before it in the order with the same key and tokens).
"""
Key = tuple[Same, int, bool, Phase]
"""A source, its tokens per window, whether documents are packed, and a phase (`data.windows`).

Samples are numbered within a key. In two runs, the same key and number mean the same sample.
"""
Samples = dict[Key, list[Range]]
"""Ranges of sample numbers by `Key`; ranges of a key overlap where a run repeats samples."""


def samples_of(ledger: Ledger, steps: Iterable[Steps]) -> Samples:
    """Return the numbers of the samples that ``steps`` used, by `Key`.

    Raises:
        ConfigError: the order of samples of a step is unknown.
    """
    samples: Samples = defaultdict(list)
    for each in steps:
        order = ledger.order_of(each)
        sources = _same(order)
        packed = isinstance(order, PackedOrder)
        for taken in order.taken(each.sample, each.stop):
            key = sources[taken.source], order.window, packed, taken.phase
            samples[key].append((taken.first, taken.end))
    return samples


def _same(order: SampleOrder) -> list[Same]:
    """Return, for each source of an order, a key that identifies the source in several runs.

    Sources of one order get different keys even if their names and lengths are equal.
    """
    kinds = [(source.key, source.tokens) for source in order.sources]
    return [(*kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds)]


def _names(ledgers: Iterable[Ledger]) -> dict[Same, str]:
    """Return the path, without suffix, of each source's dataset.

    Keys identify a source in several runs. If ledgers give different paths for a source, the path
    in the last of them is returned.
    """
    prefixes: dict[Same, str] = {}
    for ledger in ledgers:
        for each in ledger.history.steps:
            if each.order is not None:
                order = ledger.order_of(each)
                names = map(ledger.name_of, order.sources)
                prefixes |= zip(_same(order), names, strict=True)
    return prefixes


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the union of ``ranges`` as disjoint, sorted ranges."""
    disjoint = list[Range]()
    for begin, end in sorted(ranges):
        if disjoint and begin <= disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(disjoint[-1][1], end)
        else:
            disjoint.append((begin, end))
    return disjoint


def size(ranges: Iterable[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


def shared(first: Iterable[Range], second: Iterable[Range]) -> int:
    """Return how many numbers lie both in the ranges ``first`` and in the ranges ``second``."""
    one = merged(first)
    two = merged(second)
    return size(one) + size(two) - size(merged([*one, *two]))


def holes(ranges: Iterable[Range]) -> int:
    """Return how many numbers, from 0 to the largest end of a range, lie in no range."""
    covered = [(0, 0), *merged(ranges)]
    return sum(after[0] - before[1] for before, after in pairwise(covered))


def check_of(ledger: Ledger) -> tuple[int, int]:
    """Return how many samples a run used more than once, and how many it skipped.

    Reading a source again in the next epoch does not count as a repetition. Steps whose work was
    lost by a restart are not checked. The number of skipped samples is 0 if the order of some steps
    is unknown.
    """
    steps = [each for each in ledger.history.steps if each.order is not None]
    samples = samples_of(ledger, steps).values()
    repeated = sum(size(ranges) - size(merged(ranges)) for ranges in samples)
    is_complete = len(steps) == len(ledger.history.steps)
    return repeated, sum(map(holes, samples)) if is_complete else 0


@dataclass
class Compared:
    """The samples of one source in a run, and in a second run that continues or branches off.

    Attributes:
        before: number of samples up to the step where the second run begins.
        first, second: number of samples of each run after that step.
        both: number of different samples that both runs used after that step.
        repeated: number of earlier samples that the second run used again.
        lost: number of samples that were used neither before nor by the second run, although the
            second run used later ones.
    """

    source: str
    before: int = 0
    first: int = 0
    second: int = 0
    both: int = 0
    repeated: int = 0
    lost: int = 0


def compare(first: Ledger, second: Ledger) -> tuple[int, list[Compared]]:
    """Compare a run with a second run that continues it in another folder, or branches off.

    Return the last step that both runs share, and a `Compared` for each source.

    Raises:
        ConfigError: the samples cannot be matched, since both runs read a source in orders of their
            own, for example with other seeds; or the order of some steps is unknown.
    """
    branch = max(first.record.own_start, second.record.own_start)
    before, one, two = (
        samples_of(ledger, _between(ledger.history, low, high))
        for ledger, low, high in ((first, 0, branch), (first, branch, None), (second, branch, None))
    )
    names = _names((second, first))
    _check_phases(before, one, two, names)
    rows: dict[Same, Compared] = {}
    for key in dict.fromkeys([*before, *one, *two]):
        a, b, c = (part.get(key, []) for part in (before, one, two))
        row = rows.setdefault(key[0], Compared(names[key[0]]))
        row.before += size(a)
        row.first += size(b)
        row.second += size(c)
        row.both += shared(b, c)
        row.repeated += shared(a, c)
        row.lost += holes([*a, *c]) if c else 0
    return branch, sorted(rows.values(), key=lambda row: row.source)


def _between(history: History, low: int, high: int | None) -> list[Steps]:
    """Return the steps after step ``low`` up to and including ``high``; None for no upper end.

    Raises:
        ConfigError: ``low`` or ``high`` lies within steps that are only recorded as a whole.
    """
    steps = []
    for each in history.steps:
        first = max(each.iteration, low) + 1
        last = min(each.done, high or each.done)
        if first > last or high == 0:
            continue
        if each.batch is None and (first, last) != (each.iteration + 1, each.done):
            raise ConfigError(
                f"Steps {each.iteration + 1} to {each.done} are recorded only as a whole, so that "
                f"the runs cannot be compared after step {low or high}."
            )
        steps.append(each.between(first, last, each.reason))
    return steps


def _check_phases(before: Samples, one: Samples, two: Samples, names: Mapping[Same, str]) -> None:
    """Raise a ConfigError if the runs read a source in different orders, which cannot be compared.

    The arguments are the samples before the branch, those of each run after it, and the names of
    the sources.
    """
    for last in {names[key[0]].rpartition("/")[2] for key in one}:
        own, other = (
            {key for key in part if names[key[0]].rpartition("/")[2] == last} for part in (one, two)
        )
        if other and own - other - before.keys() and other - own - before.keys():
            raise ConfigError(
                f"The samples of {last} cannot be matched, since both runs read it in an order of "
                "their own (seed, tokens, packing or length of samples); compare their `--export`s "
                "instead."
            )
