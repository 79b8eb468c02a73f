"""Packets and frames in the order and at the times of a file, by stand-ins for FFmpeg's objects."""

from collections.abc import Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import pytest

from megatron_ext.video.data import video_files
from megatron_ext.video.data.clips import Clip
from megatron_ext.video.data.frames import decode, probe
from megatron_ext.video.data.geometry import ClipShape
from tests.video.data import making


def packets(*dts: int | None, size: int = 5) -> list[Any]:
    return [SimpleNamespace(dts=time, size=size) for time in dts]


def test_timestamps_may_jump_back_by_half_a_second() -> None:
    """Packets without a time are no jump, and the time before them counts on."""
    stream = SimpleNamespace(time_base=Fraction(1, 10))

    def passed(*dts: int | None) -> list[Any]:
        container = SimpleNamespace(demux=lambda stream: packets(*dts))
        return [packet.dts for packet in video_files._packets(container, stream)]

    for times in ([0, 10, 5, 4, 20], [0, 10, None, 5, None], [None, 7]):
        assert passed(*times) == times
    with pytest.raises(ValueError, match=r"jump back by 0.60 s, as where files were joined"):
        passed(0, 10, 4)
    with pytest.raises(ValueError, match=r"jump back by 0.70 s"):
        passed(10, None, 3)


class Decoder:
    """Decodes the packets with the given times, which may be "bad", to frames of their names."""

    def __init__(self, frames: dict[int | None, Sequence[str] | str]) -> None:
        self.frames = frames
        self.asked: list[int | None] = []

    def __call__(self, packet: Any) -> Sequence[str]:
        self.asked.append(packet.dts)
        found = self.frames[packet.dts]
        if isinstance(found, str):
            raise av.InvalidDataError(1, f"{found} {packet.dts}")
        return found


def decoded(decoder: Decoder, given: list[Any]) -> list[str]:
    return list(video_files._decoded_by(decoder, iter(given)))


def test_errors_before_the_first_frame_are_passed_over_and_later_ones_are_not() -> None:
    frames: dict[int | None, Sequence[str] | str] = {
        0: "bad", 1: [], 2: "bad", 3: ["a"], 4: [], 5: ["b", "c"], None: ["d"],
    }  # fmt: skip
    decoder = Decoder(frames)
    given = packets(0, 1, 2, 3, 4)
    # An empty packet with a time repeats a picture; one without a time asks for the last frames.
    given += [*packets(9, size=0), *packets(5), *packets(None, size=0)]
    assert decoded(decoder, given) == ["a", "b", "c", "d"]
    assert decoder.asked == [0, 1, 2, 3, 4, 5, None]
    with pytest.raises(av.InvalidDataError, match="bad 2"):
        decoded(Decoder(frames), packets(3, 2, 5))
    with pytest.raises(av.InvalidDataError, match="bad 0"):
        decoded(Decoder(frames), packets(0, 1, 2))
    assert decoded(Decoder(frames), packets(1, 4)) == []


def test_frames_without_times_of_their_own_take_those_of_their_packets() -> None:
    times = [None, 4, None, 6, 5, 30, None]
    frames = [SimpleNamespace(dts=dts, pts=None, duration=3) for dts in times]
    frames[-1].duration = None
    found = [frame.pts for frame in video_files._in_order(iter(frames))]
    assert found == [None, 4, 7, 10, 13, 30, 31]
    # The first of three packets shows by how many frames decoding lags behind.
    timed = [(0, 2), (2, 2), (4, 2)]
    assert video_files._behind(timed, 2) == [(2, 2), (4, 2), (6, 2)]
    assert video_files._behind(timed, 0) == timed
    assert video_files._behind([(0, 0), (1, 0)], 5) == [(2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("keys", "sought", "begin"),
    [
        ([97], [90], 97), ([98, 30], [90, 20], 30), ([0, 97], [90, 20], 97),
        ([98, 99], [90, 20], 0),
        ([None, 1], [90, 20], 1), ([97, 30], [90], 97),
    ],
)  # fmt: skip
def test_a_video_is_sought_to_a_key_frame_before_the_frame_that_is_wanted(
    keys: list[int | None], sought: list[int], begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a second before 10 s is the last place, since filters use earlier frames."""
    seeks: list[int] = []

    def frame(pts: int | None, key_frame: bool) -> Any:
        return SimpleNamespace(pts=pts, key_frame=key_frame, time_base=Fraction(1, 10))

    def decoded(container: Any, stream: Any) -> Any:
        if not seeks:
            return iter([frame(0, True), frame(1, False)])
        return iter([frame(-9, False), frame(keys[len(seeks) - 1], True), frame(99, False)])

    monkeypatch.setattr(video_files, "_decoded", decoded)
    container = SimpleNamespace(
        seek=lambda time, stream: seeks.append(time), format=SimpleNamespace(name="mp4")
    )
    near = video_files._near(container, SimpleNamespace(), 10.0)
    assert seeks == sought
    if begin == 0:
        assert near is None
    else:
        assert near is not None and [one.pts for one in near] == [0, begin, 99]


@pytest.mark.parametrize(
    ("audio", "video", "holds"),
    [
        ((), (), "neither sound nor pictures"),
        (("aac",), (), "only sound"),
        ((), ("cover",), "neither sound nor pictures and a cover picture"),
    ],
)
def test_a_file_without_video_is_told_by_what_it_holds(
    audio: tuple[str, ...], video: tuple[str, ...], holds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    covers = [SimpleNamespace(disposition=av.stream.Disposition.attached_pic) for _ in video]
    streams = SimpleNamespace(audio=audio, video=covers)

    @contextmanager
    def opened(file: str) -> Any:
        yield SimpleNamespace(streams=streams, metadata={})

    monkeypatch.setattr(av, "open", opened)
    with (
        pytest.raises(ValueError, match=rf"^it has no video, {holds}$"),
        video_files._opened(Path("a.mp4")),
    ):
        pass


def test_a_last_frame_that_stays_counts_by_its_duration(tmp_path: Path) -> None:
    """The rate of the clip varies; where it is constant, the last frame is as long as others."""
    made = making.pictures(6)
    for times, last, count in (([0, 1, 2, 3, 7, 8], 4, 12), ([0, 1, 2, 3, 4, 5], 4, 6)):
        path = tmp_path / f"{count}.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream(
                "libx264", rate=8, options={"tune": "zerolatency", "crf": "5"}
            )
            stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
            lengths = [after - time for time, after in pairwise([*times, times[-1] + last])]
            for time, length, picture in zip(times, lengths, made, strict=True):
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                frame.pts, frame.time_base = time, Fraction(1, 8)
                for packet in stream.encode(frame):
                    packet.duration = round(length / 8 / packet.time_base)
                    container.mux(packet)
            assert not stream.encode()
        clip = Clip(str(path), "x")
        assert probe(clip) == ClipShape(count, 32, 32, 8.0)
        assert decode(clip, 0, 1, count, (32, 32)).size(1) == count
