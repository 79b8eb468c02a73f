"""The windows of one source, and which of them a sample reads when the sample length changes.

A source is a range of tokens, which each epoch cuts into windows anew (see `order`). All windows
are as long as the run's first samples, and are numbered through all epochs. Later samples may have
another length. A longer sample joins successive windows. A shorter sample is one of the equal parts
of a window; it is best to begin a run with the longest samples.

Parts are read by groups of up to `GROUP` windows of the same epoch: the parts of a group are
permuted together, so that neighbours in the text do not share a batch. If the sample length changes
before all parts of a group have been read, the next samples are cut or joined from the left-over
parts; padding may fill the last one. So no token is lost or repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megatron_ext.data.permutation import Ints, Words, derived, key_of, permute

GROUP = 4096
"""Number of windows whose parts are permuted together if samples are shorter than windows."""
PARTS = 3
"""The ``purpose`` given to `derived` for the permutation keys of phases and groups."""


@dataclass(frozen=True)
class Rest:
    """The tokens of a group of windows that were not yet read when the sample length changed.

    Windows are cut into equal parts, and the group's parts are read in a permuted order. ``begin``
    and ``end`` count tokens in that order.

    Attributes:
        first_window: number of the group's first window, counted through all epochs.
        parts: number of parts in the whole group.
        key: key of the permutation of the group's parts.
        part: length of a part in tokens.
        begin, end: tokens ``begin`` to ``end`` - 1 are unread.
    """

    first_window: int
    parts: int
    key: int
    part: int
    begin: int
    end: int


@dataclass(frozen=True)
class Phase:
    """A period of a run with one sample length, and where its samples of a source come from.

    Attributes:
        seq_length: tokens of a sample.
        key: random key from which `group_keys` derives the permutation key of each group.
        first_window: number of the first window, counted through all epochs, that is read once
            ``rests`` have been read.
        rests: tokens that earlier phases left unread; this phase reads them first.
    """

    seq_length: int
    key: int
    first_window: int = 0
    rests: tuple[Rest, ...] = ()

    @property
    def rest_tokens(self) -> int:
        return sum(rest.end - rest.begin for rest in self.rests)

    @property
    def rest_samples(self) -> int:
        return -(-self.rest_tokens // self.seq_length)


class Source:
    """The windows of one source, in the order in which they are read.

    Args:
        name: identifies the source in the history of a run. Its last part, after any ``/``, and
            the seed determine the random order.
        tokens: number of tokens of the source, at least ``window``.
        window: tokens of a window.
        seed: seed of the run.
    """

    def __init__(self, name: str, tokens: int, window: int, seed: int) -> None:
        self.name = name
        self.tokens = tokens
        self.window = window
        self.windows = tokens // window
        self.group = min(GROUP, self.windows)
        # The folder is not part of the name, so that data which moves, for example to object
        # storage, keeps its order.
        self.key = key_of(seed, name.rpartition("/")[2])
        self._phases = 0

    def begin(self, seq_length: int) -> Phase:
        """Return the first phase of a run, whose samples have ``seq_length`` tokens."""
        return Phase(seq_length, self._phase_key())

    def change(self, phase: Phase, used: int, seq_length: int) -> Phase:
        """Return the phase that follows when ``used`` samples of ``phase`` have been read.

        Samples of the new phase have ``seq_length`` tokens.
        """
        if phase.seq_length == seq_length:
            raise ValueError(f"{self.name}: the length does not change")
        fresh = used - phase.rest_samples
        if fresh < 0:
            first = phase.first_window
            rests = self._trimmed(phase, used)
        elif phase.seq_length >= self.window:
            first = phase.first_window + fresh * (phase.seq_length // self.window)
            rests = ()
        else:
            length = phase.seq_length
            per_window = self.window // phase.seq_length
            limits = _ints(self.windows), _ints(self.group)
            group_counts = groups(_ints(fresh), _ints(phase.first_window), *limits, per_window)
            first, count, begun = (int(each[0]) for each in group_counts)
            rests = ()
            if begun:
                parts = count * per_window
                key = int(group_keys(_words(phase.key), _ints(first))[0])
                rests = (Rest(first, parts, key, length, begun * length, parts * length),)
                first += count
        return Phase(seq_length, self._phase_key(), first, rests)

    def _trimmed(self, phase: Phase, used: int) -> tuple[Rest, ...]:
        taken = used * phase.seq_length
        kept = []
        for rest in phase.rests:
            skipped = min(taken, rest.end - rest.begin)
            taken -= skipped
            if rest.begin + skipped < rest.end:
                kept.append(replace(rest, begin=rest.begin + skipped))
        return tuple(kept)

    def _phase_key(self) -> int:
        self._phases += 1
        return int(derived(_words(self.key), _ints(self._phases), PARTS)[0])

    def rest_pieces(self, phase: Phase, number: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the pieces of sample ``number`` of a phase, which is made from its ``rests``.

        A piece is (position in the sample, number of the window through all epochs, first token
        within that window, number of tokens).
        """
        begin = number * phase.seq_length
        end = (number + 1) * phase.seq_length
        passed = column = 0
        for rest in phase.rests:
            size = rest.end - rest.begin
            token = max(begin - passed, 0)
            stop = min(end - passed, size)
            while token < stop:
                part, offset = divmod(rest.begin + token, rest.part)
                length = min(rest.part - offset, stop - token)
                per_window = self.window // rest.part
                place = int(permute(_ints(part), rest.parts, rest.key)[0])
                window = rest.first_window + place // per_window
                yield column, window, place % per_window * rest.part + offset, length
                column = column + length
                token = token + length
            passed += size


def groups(
    numbers: Ints, first: Ints, windows: Ints, group: Ints, per_window: int
) -> tuple[Ints, Ints, Ints]:
    """Return, for samples shorter than a window, the group of windows that each is read from.

    Arrays are ``[m]``, an entry per sample; ``first``, ``windows`` and ``group`` may be ``[1]``.

    Args:
        numbers: numbers of the samples in their phase, from 0. Samples made from tokens that
            earlier phases left unread (`Phase.rests`) are not counted.
        first: `Phase.first_window` of the sample's phase.
        windows: number of windows in an epoch.
        group: number of windows in a whole group; the last group of an epoch may have fewer.
        per_window: number of samples in a window.

    Returns:
        Number of the group's first window (through all epochs), number of windows in the group,
        and number of the sample in the group (from 0).
    """
    # The phase may begin in the middle of an epoch, after other windows of that epoch.
    here = windows - first % windows
    later = numbers - here * per_window
    epoch, within = np.divmod(later, windows * per_window)
    begins = np.where(later < 0, first, first + here + epoch * windows)
    left = np.where(later < 0, here, windows)
    number, part = np.divmod(np.where(later < 0, numbers, within), group * per_window)
    return begins + number * group, np.minimum(group, left - number * group), part


def group_keys(keys: Words, first_windows: Ints) -> Words:
    """Return the permutation key of each group of windows, ``[m]``.

    It is derived from the key of the group's phase and the number of the group's first window.
    """
    return derived(keys, first_windows, PARTS)


def _ints(value: int) -> Ints:
    return np.array([value], dtype=np.int64)


def _words(value: int) -> Words:
    return np.array([value], dtype=np.uint64)
