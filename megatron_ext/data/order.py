"""The order of samples as a function of (seed, history of mixtures, sample number).

A source is a range of tokens that is read as a circle: its first token follows its last. Each epoch
picks a random first token, cuts the circle from there into windows of equal length, and permutes
them with its own key. Tokens that do not fill a window are left for other epochs. No list of
samples is built or stored: `interleave` maps a sample number to a source and to the number of the
sample within that source, that number gives an epoch and a place in it, and `permutation` gives the
window at this place. All ranks, workers and micro-batches call the same function, so the order does
not depend on them.

If samples and windows differ in length, a sample is a part of a window or joins several windows;
see `windows`.
"""

from __future__ import annotations

import bisect
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.interleave import Interleave
from megatron_ext.data.permutation import Ints, Words, derived, permute, unpermute
from megatron_ext.data.windows import Phase, Source, group_keys, groups
from megatron_ext.disk.reading import is_count
from megatron_ext.errors import DataError

BLOCK = 1024
"""Number of successive samples of a stage that are located at once, and cached."""
_BLOCKS_KEPT = 16
_ORDER, _SHIFT = 1, 2
"""The ``purpose`` with which `derived` makes the keys that permute an epoch's windows, and the one
for the keys that draw the epoch's first token.
"""


@dataclass(frozen=True)
class Stage:
    """A mixture that starts at sample ``start`` of the run.

    Attributes:
        seq_length: tokens of a sample.
        weights: weight of each source by name; a source without a name here has weight 0.
    """

    start: int
    seq_length: int
    weights: Mapping[str, Fraction]

    def to_dict(self) -> dict[str, Any]:
        weights = {name: str(weight) for name, weight in self.weights.items()}
        return {"start": self.start, "seq_length": self.seq_length, "weights": weights}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Stage:
        weights = {name: Fraction(weight) for name, weight in values["weights"].items()}
        return cls(int(values["start"]), int(values["seq_length"]), weights)

    def goes_on_as(self, other: Stage) -> bool:
        """Return whether both stages give samples of the same length in the same ratios."""
        return self.seq_length == other.seq_length and _ratios(self) == _ratios(other)


def _ratios(stage: Stage) -> dict[str, Fraction]:
    total = sum(stage.weights.values())
    return {name: weight / total for name, weight in stage.weights.items() if weight}


_WEIGHT = re.compile(r"[0-9]{1,200}(/0*[1-9][0-9]{0,200})?")


def check_recorded(values: object, place: str) -> None:
    """Check that values from a file have the form that `SampleOrder.to_dict` returns.

    Raises:
        DataError: the values have another form; ``place`` names the file in the message.
    """
    try:
        if isinstance(values, Mapping) and _is_recorded(values):
            return
        why = "values of other types than an order has"
    except (KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise DataError(
        f"{place} holds a damaged order of samples ({why}); use another checkpoint or record."
    )


def _is_recorded(values: Mapping[str, Any]) -> bool:
    tokens = values["tokens"]
    stages = values["stages"]
    window = values["window"]
    starts = [stage["start"] for stage in stages]
    numbers = [window, *tokens.values(), *starts]
    numbers += [stage["seq_length"] for stage in stages]
    texts = [str(weight) for stage in stages for weight in stage["weights"].values()]
    used = {name for stage in stages for name, x in stage["weights"].items() if x not in ("0", 0)}
    return (
        all(map(is_count, numbers))
        and type(values["seed"]) is int
        and all(map(_WEIGHT.fullmatch, texts))
        and all(stage["seq_length"] > 0 and stage["weights"] for stage in stages)
        and starts == sorted(starts)
        and starts[:1] == [0]
        and window > 0
        and bool(used)
        and all(tokens[name] >= window for name in used)
    )


@dataclass(frozen=True)
class Pieces:
    """Ranges of tokens that form samples; a sample consists of one or more pieces.

    All arrays are ``[p]`` int64, an entry for each piece, ordered by row and column.

    Attributes:
        rows: index of each piece's sample, from 0.
        columns: position in the sample of the piece's first token.
        sources: index of the piece's source.
        begins: index of the piece's first token in the source.
        lengths: number of tokens.
    """

    rows: Ints
    columns: Ints
    sources: Ints
    begins: Ints
    lengths: Ints

    def between(self, start: int, stop: int, row: int) -> Pieces:
        """Return the pieces of rows ``start`` to ``stop`` - 1; the first becomes row ``row``."""
        a, b = np.searchsorted(self.rows, [start, stop])
        arrays = (self.columns, self.sources, self.begins, self.lengths)
        return Pieces(self.rows[a:b] - start + row, *(x[a:b] for x in arrays))


def joined(parts: Sequence[Pieces]) -> Pieces:
    """Return all pieces of ``parts`` in order."""
    if len(parts) == 1:
        return parts[0]
    names = ("rows", "columns", "sources", "begins", "lengths")
    return Pieces(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class Taken:
    """Samples that one stage takes from one source, within some range of the run's samples.

    Attributes:
        stage, source: indices in the lists of stages and of sources of the order.
        phase: the phase of the source that the samples belong to; a phase lasts from one change of
            the sample length to the next. In runs with the same seed and window, equal phases of a
            source with the same name and size have the same samples.
        first, end: the samples ``first`` to ``end`` - 1, numbered within the source's phase.
    """

    stage: int
    source: int
    phase: Phase
    first: int
    end: int


@dataclass(frozen=True)
class _Placed:
    """A stage, the schedule of its sources, and the state of each source when the stage starts.

    Attributes:
        phases: the current phase of each source (`windows.Phase`).
        used: how many samples of that phase each source has given before the stage.
    """

    stage: Stage
    interleave: Interleave
    phases: Sequence[Phase]
    used: Sequence[int]


class SampleOrder:
    """Tells which tokens form each sample of a run, as a function of the sample's number.

    A source is a named range of tokens. Each of its epochs cuts it into windows of equal length and
    permutes them. A stage says in which ratios the sources are mixed from some sample on.

    Args:
        tokens: number of tokens of each source by name, at least ``window``.
        stages: the mixtures; the first starts at sample 0.
        window: tokens of a window: a divisor or a multiple of every sample length.
        seed: seed of the run.
    """

    def __init__(
        self, tokens: Mapping[str, int], stages: Sequence[Stage], window: int, seed: int
    ) -> None:
        self.stages = tuple(stages)
        self.window = window
        self.seed = seed
        self.sources = [Source(name, count, window, seed) for name, count in tokens.items()]
        self._starts = [stage.start for stage in stages]
        self._placed: list[_Placed] = []
        for stage in stages:
            self._placed.append(self._place(stage))
        self._windows = np.array([source.windows for source in self.sources])
        self._tokens = np.array([source.tokens for source in self.sources])
        self._keys: Words = np.array([source.key for source in self.sources], dtype=np.uint64)
        self._blocks: OrderedDict[tuple[int, int], Pieces] = OrderedDict()

    def to_dict(self) -> dict[str, Any]:
        """Return the values that determine the order, in a form for JSON."""
        return {
            "seed": self.seed,
            "window": self.window,
            "tokens": {source.name: source.tokens for source in self.sources},
            "stages": [stage.to_dict() for stage in self.stages],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SampleOrder:
        """Build the order from the values of `to_dict`, ignoring other keys."""
        stages = [Stage.from_dict(stage) for stage in values["stages"]]
        return cls(dict(values["tokens"]), stages, int(values["window"]), int(values["seed"]))

    def with_stages(self, stages: Sequence[Stage]) -> SampleOrder:
        """Return the order of the same sources with other mixtures."""
        tokens = {source.name: source.tokens for source in self.sources}
        return SampleOrder(tokens, stages, self.window, self.seed)

    def _place(self, stage: Stage) -> _Placed:
        weights = [stage.weights.get(source.name, Fraction(0)) for source in self.sources]
        phases = []
        used = []
        before = self._placed[-1] if self._placed else None
        counts = None
        if before is not None:
            counts = before.interleave.counts(stage.start - before.stage.start)
        for index, (source, weight) in enumerate(zip(self.sources, weights, strict=True)):
            if before is None or counts is None:
                phase = source.begin(stage.seq_length)
                count = 0
            else:
                phase = before.phases[index]
                count = before.used[index] + counts[index]
            if weight and phase.seq_length != stage.seq_length:
                phase = source.change(phase, count, stage.seq_length)
                count = 0
            phases.append(phase)
            used.append(count)
        return _Placed(stage, Interleave(weights), phases, used)

    def stage_at(self, number: int) -> int:
        """Return the index of the stage that has sample ``number`` of the run."""
        return bisect.bisect_right(self._starts, number) - 1

    def seq_length(self, number: int) -> int:
        """Return how many tokens sample ``number`` of the run has."""
        return self.stages[self.stage_at(number)].seq_length

    def counts(self, number: int) -> list[list[int]]:
        """Return how many of the run's first ``number`` samples each stage takes from each source.

        The result is indexed as ``[stage][source]``.
        """
        counts = []
        for index, placed in enumerate(self._placed):
            stop = self._starts[index + 1] if index + 1 < len(self._starts) else number
            inside = min(stop, number) - placed.stage.start
            if inside > 0:
                counts.append(placed.interleave.counts(inside))
        return counts

    def taken(self, start: int, stop: int) -> list[Taken]:
        """Return which samples of the sources make up samples ``start`` to ``stop`` - 1 of the run.

        There is one `Taken` for each stage and source that gives any of these samples.
        """
        taken = []
        for index, placed in enumerate(self._placed):
            begin = placed.stage.start
            end = self._starts[index + 1] if index + 1 < len(self._starts) else stop
            low = max(start, begin)
            high = min(stop, end)
            if low >= high:
                continue
            before, after = (placed.interleave.counts(number - begin) for number in (low, high))
            for source, (first, last) in enumerate(zip(before, after, strict=True)):
                if first < last:
                    used = placed.used[source]
                    phase = placed.phases[source]
                    taken.append(Taken(index, source, phase, used + first, used + last))
        return taken

    def number_of(self, stage: int, source: int, number: int) -> int:
        """Return a sample's number in the run, given its ``number`` within a phase (see `Taken`).

        The sample must be one that the given stage takes from the given source.
        """
        placed = self._placed[stage]
        place = placed.interleave.place_of(source, number - placed.used[source])
        return placed.stage.start + place

    def first_tokens(self, source: int, epochs: Ints) -> Ints:
        """Return the random first token of each of the given epochs of a source."""
        own = self.sources[source]
        keys = derived(np.full(len(epochs), own.key, dtype=np.uint64), epochs, _SHIFT)
        shifts: Ints = (keys % np.uint64(own.tokens)).astype(np.int64)
        return shifts

    def windows_at(self, source: int, epochs: Ints, places: Ints) -> Ints:
        """Return when windows are read: their positions ``[m]`` in the reading order of a source.

        Each epoch permutes its windows. Positions are counted through all epochs, from 0.

        Args:
            source: index of the source.
            epochs: epoch of each window, ``[m]``.
            places: index of each window in its epoch before the permutation, ``[m]``.
        """
        own = self.sources[source]
        keys = derived(np.full(len(epochs), own.key, dtype=np.uint64), epochs, _ORDER)
        return epochs * own.windows + unpermute(places, own.windows, keys)

    def tokens_used(self, number: int) -> dict[str, int]:
        """Return how many tokens of each source the first ``number`` samples use.

        Every sample counts in full, although the last one made of left-over parts after a change of
        the sample length may be padded.
        """
        totals = [0] * len(self.sources)
        for stage, counts in zip(self.stages, self.counts(number), strict=False):
            totals = [t + c * stage.seq_length for t, c in zip(totals, counts, strict=True)]
        return {source.name: total for source, total in zip(self.sources, totals, strict=True)}

    def locate(self, start: int, stop: int) -> Pieces:
        """Return the token ranges that form samples ``start`` to ``stop`` - 1 of the run.

        Sample ``start`` is row 0 of the result.
        """
        parts = []
        number = start
        while number < stop:
            index = self.stage_at(number)
            inside = number - self._starts[index]
            block = inside // BLOCK
            end = self._starts[index] + (block + 1) * BLOCK
            if index + 1 < len(self._starts):
                end = min(end, self._starts[index + 1])
            end = min(end, stop)
            first = inside - block * BLOCK
            pieces = self._block(index, block).between(first, first + end - number, number - start)
            parts.append(pieces)
            number = end
        return joined(parts)

    def _block(self, index: int, number: int) -> Pieces:
        key = index, number
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        self._blocks[key] = pieces = self._located(self._placed[index], number * BLOCK)
        if len(self._blocks) > _BLOCKS_KEPT:
            self._blocks.popitem(last=False)
        return pieces

    def _located(self, placed: _Placed, first: int) -> Pieces:
        """Return the pieces of the `BLOCK` samples that begin at sample ``first`` of a stage.

        The samples may not all belong to the stage; the caller selects those that do.
        """
        places, numbers = placed.interleave.places(first, first + BLOCK)
        sources = places.astype(np.int64)
        rests = np.array([phase.rest_samples for phase in placed.phases])
        numbers = numbers + (np.asarray(placed.used, dtype=np.int64) - rests)[sources]
        whole = np.flatnonzero(numbers >= 0)
        pieces = self._fresh(placed, whole, sources[whole], numbers[whole])
        if len(whole) == len(sources):
            return pieces
        others = np.flatnonzero(numbers < 0)
        pieces = joined(
            [pieces, self._left_over(placed, others, sources, numbers + rests[sources])]
        )
        order = np.lexsort((pieces.columns, pieces.rows))
        names = ("rows", "columns", "sources", "begins", "lengths")
        return Pieces(*(getattr(pieces, name)[order] for name in names))

    def _fresh(self, placed: _Placed, rows: Ints, sources: Ints, numbers: Ints) -> Pieces:
        """Return the pieces of samples that are a window, a part of one, or several joined windows.

        For samples made of left-over parts (`windows.Rest`) see `_left_over`.

        Args:
            rows: row of each sample in the result.
            sources: index of each sample's source.
            numbers: number of each sample in the phase of its source; 0 is the first sample that
                is not made of left-over parts.
        """
        length = placed.stage.seq_length
        window = self.window
        first = np.array([phase.first_window for phase in placed.phases])[sources]
        if length < window:
            per_window = window // length
            group = np.array([source.group for source in self.sources])[sources]
            counts = self._windows[sources]
            begin, size, part = groups(numbers, first, counts, group, per_window)
            phase_keys: Words = np.array([phase.key for phase in placed.phases], dtype=np.uint64)
            place = permute(part, size * per_window, group_keys(phase_keys[sources], begin))
            windows = begin + place // per_window
            begins = self._begins(sources, windows, place % per_window * length)
            return Pieces(rows, np.zeros_like(rows), sources, begins, np.full_like(rows, length))
        joins = length // window
        windows = (first + numbers * joins)[:, None] + np.arange(joins)
        rows = np.repeat(rows, joins)
        sources = np.repeat(sources, joins)
        columns = np.tile(np.arange(joins) * window, len(numbers))
        begins = self._begins(sources, windows.ravel(), np.zeros_like(rows))
        return Pieces(rows, columns, sources, begins, np.full_like(rows, window))

    def _left_over(self, placed: _Placed, rows: Ints, sources: Ints, numbers: Ints) -> Pieces:
        pieces = []
        for row in rows.tolist():
            index = int(sources[row])
            parts = self.sources[index].rest_pieces(placed.phases[index], int(numbers[row]))
            pieces += [(row, column, index, *rest) for column, *rest in parts]
        row, column, source, window, offset, length = np.array(pieces, dtype=np.int64).T
        return Pieces(row, column, source, self._begins(source, window, offset), length)

    def _begins(self, sources: Ints, windows: Ints, offsets: Ints) -> Ints:
        """Return the first token of each of m parts of windows, as an index in its source, ``[m]``.

        Args:
            sources: index of each part's source.
            windows: position of each part's window in the order in which the source is read,
                counted through all epochs.
            offsets: position of each part's first token in the window.
        """
        counts = self._windows[sources]
        keys = self._keys[sources]
        epochs, places = np.divmod(windows, counts)
        places = permute(places, counts, derived(keys, epochs, _ORDER))
        tokens = self._tokens[sources]
        shifts = (derived(keys, epochs, _SHIFT) % tokens.astype(np.uint64)).astype(np.int64)
        begins: NDArray[np.int64] = (shifts + places * self.window + offsets) % tokens
        return begins
