"""Frame rates from timestamps, and which frames are shown when."""

import numpy as np
import pytest

from megatron_ext.video.data.timing import frame_rate, frames_at


def chosen(times: list[float], places: list[float], step: float) -> list[int]:
    frames = [(time, 1.0, number) for number, time in enumerate(times)]
    return [mixed[0][0] for mixed in frames_at(frames, places, step=step)]


@pytest.mark.parametrize("rate", [15, 24000 / 1001, 24, 25, 30000 / 1001, 60000 / 1001, 24.02])
def test_rates_are_read_through_timestamps_in_milliseconds(rate: float) -> None:
    exact = 0.08 + np.arange(100) / rate
    assert frame_rate(exact, (None,)) == (pytest.approx(rate, rel=1e-4), True)
    rounded = np.round(exact, 3)
    # A header that is a little off, as after a remux, does not decide.
    found, constant = frame_rate(rounded, (None, rate * 1.0005))  # type: ignore[arg-type]
    assert constant and found == pytest.approx(rate, rel=6e-4)


def test_variable_clips_have_the_rate_of_their_usual_interval() -> None:
    times = np.concatenate([np.arange(24) / 24, 1 + np.arange(8) / 4])
    assert frame_rate(times, ()) == (24.0, False)
    # A phone that drops one frame in seven, with timestamps in milliseconds.
    kept = np.array([i for i in range(70) if i % 7 != 3])
    assert frame_rate(np.round(kept / 30, 3), ()) == (30.0, False)
    assert frame_rate(np.array([0, 0.7, 1.4, 4.9]), ()) == (pytest.approx(1 / 0.7), False)


@pytest.mark.parametrize(("source", "rate"), [(25, 16), (29.97, 16), (59.94, 24), (59.94, 16)])
def test_dense_frames_are_the_nearest_in_time(source: float, rate: float) -> None:
    step = source / rate
    places = [step * number for number in range(40)]
    # Backwards, since of two frames as near the later one is taken.
    nearest = [199 - int(np.abs(np.arange(199, -1, -1) - place).argmin()) for place in places]
    assert chosen([float(i) for i in range(200)], places, step) == nearest


def test_whole_strides_take_every_nth_frame_even_with_rounded_times() -> None:
    for stride in (1, 2, 3, 4):
        times = (np.round(np.arange(60) / 60, 3) * 60).tolist()
        places = [float(stride * number) for number in range(60 // stride)]
        assert chosen(times, places, stride) == list(range(0, 60, stride))


def test_frames_that_stand_still_are_repeated_and_the_last_one_ends() -> None:
    times = [0.0, 1.0, 2.0, 8.0, 9.0]
    assert chosen(times, [float(i) for i in range(12)], 1.0) == [0, 1, 2, 2, 2, 2, 2, 2, 3, 4]
    # Of two frames as near, the later one.
    assert chosen([0.0, 1.0, 2.0, 3.0], [0.0, 1.5], 1.5) == [0, 2]
    # Frames whose time does not rise are left out.
    assert chosen([0.0, 1.0, 1.0, 2.0], [0.0, 1.0, 2.0], 1.0) == [0, 1, 3]
    assert chosen([0.0, 1.0, 1.0, 0.5, 2.0], [0.0, 1.2], 1.2) == [0, 1]


def test_a_last_frame_without_a_duration_lasts_one_frame() -> None:
    """Some formats store no durations; others store that of a picture which stays."""
    for duration, end in ((0.0, 2.0), (1.0, 2.0), (2.5, 3.5)):
        frames = [(0.0, 1.0, "a"), (1.0, duration, "b")]
        places = [0.5 * number for number in range(9)]
        found = [mixed[0][0] for mixed in frames_at(frames, places, step=1.0)]
        assert found == ["a" if place < 0.5 else "b" for place in places if place < end]


def test_blending_mixes_by_distance_and_holds_what_stands_still() -> None:
    frames = [(float(time), 1.0, name) for time, name in zip((0, 1, 2, 8), "abcd", strict=True)]
    places = [0.0, 1.25, 2.5, 6.5, 7.25]
    mixed = list(frames_at(frames, places, step=1.25, blend=True))
    assert mixed[0] == [("a", 1.0)]
    assert mixed[1] == [("b", pytest.approx(0.75)), ("c", pytest.approx(0.25))]
    assert mixed[2] == mixed[3] == [("c", 1.0)]
    assert mixed[4] == [("c", pytest.approx(0.6)), ("d", pytest.approx(0.4))]
