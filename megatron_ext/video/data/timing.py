"""Determines the frame rate of a clip from its timestamps, and selects frames by time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Frame = TypeVar("Frame")

_WHOLE = (5, 6, 8, 10, 12, 15, 16, 20, 24, 25, 30, 48, 50, 60, 90, 100, 120, 240)
_NTSC = (24, 30, 48, 60, 120)
USUAL_RATES = (*map(Fraction, _WHOLE), *(Fraction(1000 * rate, 1001) for rate in _NTSC))
"""The standard frame rates, in frames per second: whole ones, and NTSC's such as 30000/1001."""

_ROUNDING = 1.1e-3
"""The largest rounding error of a timestamp, in seconds.

Timestamps are whole milliseconds in Matroska files, and in files that were converted from these."""
_SNAP = 0.02
"""The largest relative change by which a measured frame rate is rounded to a nearby known rate.

Known rates are those in headers and `USUAL_RATES`. Only clips whose rate varies are rounded."""
_ON_GRID = 0.1
"""The largest change by which `frames_at` rounds the time of a frame to a whole number.

The unit is frames, at the clip's rate."""


def frame_rate(times: NDArray[np.float64], given: Sequence[Fraction | None]) -> tuple[float, bool]:
    """Return (frame rate, whether it is constant) for a clip whose frames have these timestamps.

    Rates in headers are checked, since they are often wrong after a file was remuxed or cut. The
    candidates are the rates in headers, then the standard rates, then the mean rate. For each, the
    timestamps are compared with the times of evenly spaced frames; the spread of a candidate is the
    largest difference minus the smallest. The rate is constant if a candidate's spread is less than
    half of its frame interval and, but for rounding, the smallest of all spreads. The first such
    candidate is returned.

    Otherwise the rate varies. The result is then one over the typical interval between two frames
    or, if it is at most 2% off, the nearest rate from a header or standard rate.

    Args:
        times: at least two increasing timestamps in seconds.
        given: the rates in headers, the most trusted first.
    """
    mean = (len(times) - 1) / (times[-1] - times[0])
    rates = [float(rate) for rate in (*given, *USUAL_RATES) if rate]
    candidates = [*rates, mean]
    steps = np.arange(len(times))
    spreads = [float(np.ptp(times - steps / rate)) for rate in candidates]
    fits = min(spreads) + _ROUNDING
    for rate, spread in zip(candidates, spreads, strict=True):
        if spread <= fits and spread < 0.5 / rate:
            return rate, True
    intervals = np.diff(times)
    middle = np.median(intervals)
    usual = 1 / float(intervals[np.abs(intervals - middle) <= middle / 3].mean())
    nearest = min(rates, key=lambda rate: abs(rate - usual))
    return nearest if abs(nearest - usual) <= _SNAP * usual else usual, False


def frames_at(
    frames: Iterable[tuple[float, float, Frame]],
    places: Sequence[float],
    *,
    step: float,
    blend: bool = False,
) -> Iterator[list[tuple[Frame, float]]]:
    """Yield, for each time of ``places``, the frames to show: a list [(frame, weight), ...].

    By default the list has one frame: the nearest in time, or the later one of two equally near
    frames. But no frame except the first is shown earlier than half a ``step`` before its time, as
    in ffmpeg's filter fps. The iterator ends early, at the first time after the last frame's end.

    Args:
        frames: (time, duration, content) of each frame, in order of time. Times are in frames of
            the clip's rate, from the clip's beginning.
        places: the times, increasing.
        step: interval between two of ``places``, in the same unit.
        blend: whether to mix the two frames around a time instead, weighted by their distances.
    """
    left = iter(places)
    place = next(left, None)
    before: tuple[float, float, Frame] | None = None
    for raw, duration, content in frames:
        whole = round(raw)
        time = float(whole) if abs(raw - whole) < _ON_GRID else raw
        if before is not None and time <= before[0]:
            continue
        gap = 0.0 if before is None else time - before[0]
        while place is not None and place <= time + _EPSILON:
            if before is None:
                share = 1.0
            elif blend:
                share = max(0.0, 1 - (time - place) / min(gap, max(step, 1.0)))
            else:
                share = float(place >= time - min(gap, step) / 2 - _EPSILON)
            yield _mixed(before, content, share)
            place = next(left, None)
        if place is None:
            return
        before = (time, max(duration, 1.0), content)
    while before is not None and place is not None and place < before[0] + before[1] - _EPSILON:
        yield [(before[2], 1.0)]
        place = next(left, None)


_EPSILON = 1e-6


def _mixed(
    before: tuple[float, float, Frame] | None, after: Frame, share: float
) -> list[tuple[Frame, float]]:
    """Return [(earlier frame, 1 - share), (later frame, share)].

    ``before`` is (time, duration, content) of the earlier frame, ``after`` the content of the later
    one. A frame whose weight is almost 0 is left out. If ``before`` is None, the later frame has
    weight 1.
    """
    if before is None or share > 1 - _EPSILON:
        return [(after, 1.0)]
    if share < _EPSILON:
        return [(before[2], 1.0)]
    return [(before[2], 1 - share), (after, share)]
