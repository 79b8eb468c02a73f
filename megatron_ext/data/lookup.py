"""Finds the samples of a run that read given tokens of a source: the inverse of `order`.

Each epoch cuts a source into windows from a random first token on, and permutes them. The first
token tells which windows hold the given tokens. The inverse of the permutation tells when these
windows are read, and the schedule of the sources turns that into sample numbers of the run. So
nothing has to be searched, except the few parts of windows that were left over when the sample
length changed (see `windows`). In a packed order (`packed_order`), the blocks that hold the given
tokens are packed once more to find the samples; a short range lies in one or two blocks per epoch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.order import SampleOrder, Taken
from megatron_ext.data.packed_order import PackedOrder
from megatron_ext.data.permutation import Ints, unpermute
from megatron_ext.data.windows import group_keys, groups


def samples_with(order: SampleOrder, source: int, begin: int, end: int, stop: int) -> list[int]:
    """Return the numbers of the samples that hold any of the given tokens, in ascending order.

    Args:
        order: the order of the samples of a run.
        source: index of the source of the tokens.
        begin, end: the tokens ``begin`` to ``end`` - 1 of that source.
        stop: only the first ``stop`` samples of the run are searched.
    """
    samples = []
    for taken in order.taken(0, stop):
        if taken.source != source:
            continue
        if isinstance(order, PackedOrder):
            numbers = _packed_numbers(order, taken, begin, end)
        else:
            numbers = _numbers(order, taken, begin, end)
        samples += [order.number_of(taken.stage, source, number) for number in numbers]
    return sorted(samples)


def _numbers(order: SampleOrder, taken: Taken, begin: int, end: int) -> list[int]:
    """Return which of the samples ``taken`` hold any of the tokens ``begin`` to ``end`` - 1.

    The result numbers the source's samples from the start of the phase ``taken.phase``, which lasts
    from one change of the sample length to the next.
    """
    left_over = taken.phase.rest_samples
    numbers = _rest_numbers(order, taken, begin, end)
    if taken.end > left_over:
        fresh = _fresh_numbers(order, taken, begin, end) + left_over
        inside = (fresh >= max(taken.first, left_over)) & (fresh < taken.end)
        numbers += np.unique(fresh[inside]).tolist()
    return numbers


def _packed_numbers(order: PackedOrder, taken: Taken, begin: int, end: int) -> list[int]:
    """Return which of the packed samples ``taken`` hold any of the tokens ``begin`` to ``end`` - 1.

    The sample length does not change in a packed order, so the numbers count the samples of the
    source from the start of the run.
    """
    source = taken.source
    numbers = list[int]()
    count = order.sources[source].windows
    epochs = np.arange(taken.first // count, (taken.end - 1) // count + 1, dtype=np.int64)
    epoch, place, _ = _places(order, source, begin, end, epochs)
    blocks = np.unique(np.stack([epoch, place // order.block_samples]), axis=1)
    for number, block in blocks.T.tolist():
        packed, first = order.packed_block(source, number, block)
        begins, lengths = (x.astype(np.int64) for x in (packed.begins, packed.lengths))
        pieces = np.flatnonzero(_meets(order, source, first + begins, lengths, begin, end))
        samples = np.unique(np.searchsorted(packed.firsts, pieces, side="right") - 1)
        places = block * order.block_samples + samples
        numbers += order.windows_at(source, np.full_like(places, number), places).tolist()
    return [each for each in numbers if taken.first <= each < taken.end]


def _meets(
    order: SampleOrder, source: int, begins: Ints, lengths: Ints, begin: int, end: int
) -> NDArray[np.bool_]:
    """Return which token ranges overlap the range from ``begin`` to ``end`` - 1, bool ``[m]``.

    The ranges begin at the source's tokens ``begins``, ``[m]``. A range that goes past the source's
    last token continues with the first one.
    """
    tokens = order.sources[source].tokens
    return ((begin - begins) % tokens < lengths) | ((begins - begin) % tokens < end - begin)


def _rest_numbers(order: SampleOrder, taken: Taken, begin: int, end: int) -> list[int]:
    """Return which samples made of left-over parts hold any of the tokens ``begin`` to ``end`` - 1.

    Only samples of ``taken`` are searched. Left-over parts are parts of windows that were not yet
    read when the sample length changed. The samples made of them come first in the new phase (see
    `Taken`); the result numbers them within that phase.
    """
    source = order.sources[taken.source]
    phase = taken.phase
    numbers = range(taken.first, min(taken.end, phase.rest_samples))
    rows = [(n, *rest) for n in numbers for _, *rest in source.rest_pieces(phase, n)]
    if not rows:
        return []
    number, window, offset, length = np.array(rows, dtype=np.int64).T
    limits = int(window.min()), int(window.max()) + 1
    windows, begins = _windows(order, taken.source, begin, end, *limits)
    begin_of_window = dict(zip(windows.tolist(), begins.tolist(), strict=True))
    own = np.array([x in begin_of_window for x in window.tolist()])
    first = offset[own] + [begin_of_window[x] for x in window[own].tolist()]
    chosen = number[own][_meets(order, taken.source, first, length[own], begin, end)]
    return [int(n) for n in np.unique(chosen)]


def _fresh_numbers(order: SampleOrder, taken: Taken, begin: int, end: int) -> Ints:
    """Return which samples of the phase ``taken.phase`` hold any token ``begin`` to ``end`` - 1.

    Samples made of left-over parts are not searched (`_rest_numbers` does that); number 0 is the
    first sample after them. The result may have samples outside ``taken``, which the caller drops.
    """
    phase = taken.phase
    own = order.sources[taken.source]
    length = phase.seq_length
    first, last = (max(0, n - phase.rest_samples) for n in (taken.first, taken.end - 1))
    if length >= order.window:
        joins = length // order.window
        low = phase.first_window + first * joins
        high = phase.first_window + (last + 1) * joins
        windows, _ = _windows(order, taken.source, begin, end, low, high)
        return (windows - phase.first_window) // joins
    per_window = order.window // length
    zero, size, group = (
        np.array([value], dtype=np.int64) for value in (phase.first_window, own.windows, own.group)
    )
    ends = np.array([first, last], dtype=np.int64)
    firsts, counts, _ = groups(ends, zero, size, group, per_window)
    low = int(firsts[0])
    high = int(firsts[1] + counts[1])
    windows, begins = _windows(order, taken.source, begin, end, low, high)
    whole = (windows - phase.first_window) * per_window
    firsts, counts, _ = groups(whole, zero, size, group, per_window)
    # These are all parts of the windows; only some of them hold the tokens.
    index = np.repeat(np.arange(len(windows)), per_window)
    part = np.tile(np.arange(per_window), len(windows))
    lengths = np.full(len(part), length)
    holds = _meets(order, taken.source, begins[index] + part * length, lengths, begin, end)
    index = index[holds]
    part = part[holds]
    keys = group_keys(np.full(len(windows), phase.key, dtype=np.uint64), firsts)
    places = (windows - firsts)[index] * per_window + part
    numbers = unpermute(places, (counts * per_window)[index], keys[index])
    return numbers + ((firsts - phase.first_window) * per_window)[index]


def _windows(
    order: SampleOrder, source: int, begin: int, end: int, low: int, high: int
) -> tuple[Ints, Ints]:
    """Return the windows that hold any token from ``begin`` to ``end`` - 1, and their first tokens.

    Windows are numbered through all epochs, in the order in which the source is read. Only windows
    ``low`` to ``high`` - 1 are searched. A first token is not reduced modulo the source's length.
    """
    count = order.sources[source].windows
    epochs = np.arange(low // count, (high - 1) // count + 1, dtype=np.int64)
    epoch, place, first = _places(order, source, begin, end, epochs)
    windows = order.windows_at(source, epoch, place)
    inside = (windows >= low) & (windows < high)
    return windows[inside], first[inside]


def _places(
    order: SampleOrder, source: int, begin: int, end: int, epochs: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return which windows of the given epochs hold any of the tokens ``begin`` to ``end`` - 1.

    The result is three arrays with an entry for each of these windows: its epoch, its index among
    the windows of the epoch before they are permuted, and its first token in the source (not
    reduced modulo the source's length).
    """
    own = order.sources[source]
    window = order.window
    # Counted from an epoch's first token, a range may cross the end of the circle once.
    shifts = order.first_tokens(source, epochs)
    starts = (begin - shifts) % own.tokens
    ends = starts + end - begin
    steps = np.arange((end - begin - 1) // window + 2, dtype=np.int64)
    hits = []
    for start, stop in ((starts, np.minimum(ends, own.tokens)), (starts * 0, ends - own.tokens)):
        places = (start // window)[:, None] + steps
        rows, columns = np.nonzero((places * window < stop[:, None]) & (places < own.windows))
        place = places[rows, columns]
        hits.append((epochs[rows], place, shifts[rows] + place * window))
    epoch, place, first = (np.concatenate(each) for each in zip(*hits, strict=True))
    return epoch, place, first
