"""Reads the frames of video files through FFmpeg, as a player shows them.

A player turns and mirrors frames by their display matrix, widens pixels that are not square,
deinterlaces, maps HDR to the range of a screen, and shows what lies under transparent parts. The
filters for this are FFmpeg's own, chosen by what the stream and its frames say.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np

from megatron_ext.video.data.members import ClipFile, Member, readable
from megatron_ext.video.data.pictures import Colour, Picture, composited
from megatron_ext.video.data.timing import frame_rate

av: Any
try:
    import av
    import av.filter
except ImportError:
    av = None

_PICTURES = ("attached_pic", "timed_thumbnails")
"""Dispositions of video streams that are no video, such as the cover of an album."""
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""Decoders that read the transparency of a codec; FFmpeg's own ones leave it out."""
_STILLS = ("heic", "heix", "heim", "heis", "mif1", "avif")
"""Brands of files that hold a picture, and no video."""
_HDR = {16: "PQ", 18: "HLG"}
"""Transfer functions, by their number in ITU-T H.273."""
_HDR_FILTER = "scale"
_OF_THREAD = threading.local()
_TO_SCREEN = "out_transfer=bt709:out_primaries=bt709:out_color_matrix=bt709"


@dataclass(frozen=True)
class VideoFacts:
    """The facts of a video file: size of the upright picture in square pixels, frames, and rate.

    Attributes:
        num_frames: frames at the rate ``fps``, with those that would fill pauses.
        fps: usual frame rate; 0 for one frame.
    """

    num_frames: int
    height: int
    width: int
    fps: float


def video_facts(path: ClipFile) -> VideoFacts:
    """Return what a video file holds, from the packets of its stream and its first frame.

    ValueError is raised for a file without video, and errors of FFmpeg for one that it cannot read.
    """
    with _opened(path) as (container, stream):
        by_decoding = _lacks_times(container)
        timed = [
            (packet.dts if by_decoding else packet.pts, packet.duration or 0)
            for packet in _packets(container, stream)
            # Packets before the beginning of an edited mp4 give no frame.
            if packet.size > 0 and not packet.is_discard
        ]
        base = float(stream.time_base)
        rates = [Fraction(x) for x in (stream.base_rate, stream.average_rate) if x]
    with _opened(path) as (container, stream):
        of_container = _HDR.get(stream.codec_context.color_trc)
        first = next(_decoded(container, stream), None)
        if first is None:
            raise ValueError("it has no frames")
        if of_container is not None and stream.codec_context.color_trc not in _HDR:
            raise ValueError(
                f"it is HDR ({of_container}) by the tags of the file, which the frames lack, so "
                "that it would look washed out; convert it to BT.709"
            )
        if stream.codec_context.color_trc in _HDR:
            _Renderer(stream, first, (0, 0, 0))  # refuses what it cannot map
        height, width = _size(stream, first)
        start = first.pts
    if None in (pts for pts, _ in timed) or start is None:
        # Streams without timestamps, such as raw H.264, have a rate only.
        fps = float(rates[-1]) if rates and len(timed) > 1 else 0.0
        return VideoFacts(len(timed), height, width, fps)
    if by_decoding:
        timed = _behind(timed, start)
    # Packets before the first frame that can be decoded give none, as after a cut in open groups.
    whole = sorted({pts: duration for pts, duration in timed if pts >= start}.items())
    if not whole:
        raise ValueError("it has no frames")
    if len(whole) == 1:
        return VideoFacts(1, height, width, 0.0)
    times = np.array([pts for pts, _ in whole], np.float64) * base
    fps, constant = frame_rate(times, rates)
    last = 1 if constant else max(1, round(whole[-1][1] * base * fps))
    return VideoFacts(round((times[-1] - times[0]) * fps) + last, height, width, fps)


def video_frames(
    path: ClipFile, fps: float, background: Colour, begin: float = 0
) -> Iterator[tuple[float, float, LazyFrame]]:
    """Yield the time, the duration and the picture of each frame.

    Times count frames of the rate ``fps`` from the first frame that can be decoded. Frames well
    before the time ``begin`` may be left out, so that the middle of a long video is found at once.
    """
    seconds = begin / (fps or 1)
    start: float | None = None
    renderer: _Renderer | None = None
    with ExitStack() as opened:
        container, stream = opened.enter_context(_opened(path))
        near = _near(container, stream, seconds) if seconds >= _SEEK_AFTER else None
        if near is None and seconds >= _SEEK_AFTER:
            container, stream = opened.enter_context(_opened(path))
        frames = near or _decoded(container, stream)
        for number, frame in enumerate(_deinterlaced(frames)):
            if renderer is None:
                renderer = _Renderer(stream, frame, background)
            time = number / (fps or 1) if frame.pts is None else float(frame.pts * frame.time_base)
            start = time if start is None else start
            # Older versions of PyAV do not tell it; the last frame then lasts like the others.
            ticks = getattr(frame, "duration", None) or 0
            duration = float(ticks * frame.time_base) if frame.time_base else 0.0
            yield (time - start) * fps, duration * fps, LazyFrame(renderer, frame)


def scene_times(path: ClipFile, threshold: float) -> list[float]:
    """Return when each scene begins, in seconds from the first frame that can be decoded.

    A scene begins where FFmpeg's filter select finds a change of more than ``threshold``, which
    lies between 0 and 1. The whole file is decoded. `video_facts` says what is raised.
    """
    times = [0.0]
    filters: _Filters | None = None
    begin = Fraction(0)
    with _opened(path) as (container, stream):
        rate = Fraction(stream.average_rate or stream.base_rate or 1)
        for number, frame in enumerate(_decoded(container, stream)):
            if frame.pts is None or not frame.time_base:
                frame.pts = number
                frame.time_base = 1 / rate
            if filters is None:
                begin = frame.pts * frame.time_base
                # Small frames show the same changes, in a fraction of the time.
                small = ("scale", f"w=min(iw\\,{_SCENE_WIDTH}):h=-2")
                change = ("select", f"gt(scene\\,{threshold})")
                filters = _Filters(frame, [small, change], Fraction(1))
            times += [float(x.pts * x.time_base - begin) for x in filters.push(frame)]
        if filters is not None:
            times += [float(x.pts * x.time_base - begin) for x in filters.push(None)]
    return times


_SCENE_WIDTH = 320
_SEEK_AFTER = 4.0
"""Seconds from which on a video is sought, and not decoded from its beginning."""
_SEEK_BEFORE = (1.0, 8.0)
"""Seconds before a frame that are aimed at, one after the other: broadcasts are found roughly."""
_LATEST = Fraction(1, 2)
"""Seconds by which decoding times may go back: cheap recorders write them out of order."""
_FILTERED_BEFORE = 0.25
"""Seconds before a frame that are decoded at least, since filters look at frames before it."""


def _near(container: Any, stream: Any, seconds: float) -> Iterator[Any] | None:
    """Return the first frame of a stream, and those from a key frame before a time on.

    The time counts from the first frame. The result is None where the file cannot be sought.
    """
    first = next(_decoded(container, stream), None)
    if first is None or first.pts is None or not first.time_base:
        return None
    if _lacks_times(container) and stream.codec_context.has_b_frames:
        # How far frames lag behind their packets may differ after a seek.
        return None
    latest = first.pts + (seconds - _FILTERED_BEFORE) / first.time_base
    for before in _SEEK_BEFORE:
        try:
            container.seek(first.pts + int((seconds - before) / first.time_base), stream=stream)
        except av.FFmpegError:
            return None
        frames = _decoded(container, stream)
        # Frames that are shown before the key frame refer to frames that were not decoded.
        key = next((frame for frame in frames if frame.key_frame), None)
        if key is not None and key.pts is not None and first.pts < key.pts <= latest:
            return chain([first, key], frames)
    return None


@dataclass(frozen=True)
class LazyFrame:
    """A decoded frame that is turned into pixels only if it is wanted."""

    renderer: _Renderer
    frame: Any

    def picture(self) -> Picture:
        """Return the pixels, ``[H, W, 3]`` as bytes; ValueError is raised if some are lost."""
        if self.frame.is_corrupt:
            raise ValueError(f"its frame at {self.frame.time or 0:.2f} s is damaged")
        return self.renderer.picture(self.frame)


@contextmanager
def _opened(path: ClipFile) -> Iterator[tuple[Any, Any]]:
    """Open a file, and choose its video: the largest one that is no cover picture."""
    # Without the protocol FFmpeg takes "12:" in "12:30:00.mp4" for one.
    file = readable(path) if isinstance(path, Member) else f"file:{path}"
    with av.open(file) as container:
        videos = [x for x in container.streams.video if not _is_picture(x)]
        if container.metadata.get("major_brand", "") in _STILLS and len(videos) > 1:
            raise ValueError(
                f"it is a picture of {len(videos)} parts, such as the tiles of a phone's HEIC, or "
                "its transparency, which are not put together here; convert it to PNG or JPEG"
            )
        if not videos:
            holds = "only sound" if container.streams.audio else "neither sound nor pictures"
            if container.streams.video:
                holds = f"{holds} and a cover picture"
            raise ValueError(f"it has no video, {holds}")
        yield container, max(videos, key=lambda x: (_is_default(x), x.width * x.height))


def _is_picture(stream: Any) -> bool:
    return any(bool(stream.disposition & av.stream.Disposition[name]) for name in _PICTURES)


def _is_default(stream: Any) -> bool:
    return bool(stream.disposition & av.stream.Disposition.default)


def _decoded(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the frames of a stream, with their transparency where they have one."""
    name = _ALPHA_DECODERS.get(stream.codec_context.name)
    decoder: Any = None
    if name is not None and stream.metadata.get("alpha_mode") == "1":
        if name not in av.codecs_available:
            raise ValueError(
                f"it is transparent, which needs FFmpeg's decoder {name}; install av from PyPI"
            )
        decoder = av.CodecContext.create(name, "r")

    def decode(packet: Any) -> Any:
        if decoder is None:
            return packet.decode()
        return decoder.decode(packet if packet.size else None)

    frames = _decoded_by(decode, _packets(container, stream))
    yield from _in_order(frames) if _lacks_times(container) else frames


def _packets(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the packets of a stream, and at its end an empty one.

    ValueError is raised where files were joined without new timestamps: a player would show the
    second one after the first, but by the timestamps they are shown at the same time.
    """
    last = None
    for packet in container.demux(stream):
        if None not in (last, packet.dts) and packet.dts < last - _LATEST / stream.time_base:
            seconds = float((last - packet.dts) * stream.time_base)
            raise ValueError(
                f"its timestamps jump back by {seconds:.2f} s, as where files were joined; write "
                "them anew with ffmpeg"
            )
        last = packet.dts if packet.dts is not None else last
        yield packet


def _decoded_by(decode: Callable[[Any], Sequence[Any]], packets: Iterator[Any]) -> Iterator[Any]:
    """Yield the frames of packets; those before the first frame may be of another beginning.

    A recorded broadcast begins anywhere, and players show it from the first whole frame on.
    """
    begun = False
    first_error: Exception | None = None
    for packet in packets:
        if packet.size == 0 and packet.dts is not None:
            # The frame before stays, as recorders of screens write it.
            continue
        try:
            frames = decode(packet)
        except av.InvalidDataError as error:
            if begun:
                raise
            first_error = first_error or error
            continue
        begun = begun or bool(frames)
        yield from frames
    if first_error is not None and not begun:
        raise first_error


def _lacks_times(container: Any) -> bool:
    """Return whether a format keeps no times of frames, only their number, as AVI does.

    FFmpeg then guesses them, and wrongly for frames that are not stored in the order of showing.
    """
    return bool(container.format.name == "avi")


def _in_order(frames: Iterator[Any]) -> Iterator[Any]:
    """Yield frames that are timed by the packets after which they were decoded."""
    last: int | None = None
    for frame in frames:
        if frame.dts is not None and (last is None or frame.dts > last):
            frame.pts = frame.dts
        elif last is not None:
            frame.pts = last + max(1, getattr(frame, "duration", None) or 0)
        last = frame.pts
        yield frame


def _behind(timed: list[tuple[int, int]], start: int) -> list[tuple[int, int]]:
    """Return times and durations of frames, as `_in_order` has them, from those of their packets.

    ``start`` is the time of the first frame; as many packets were read before it as frames follow
    the last packet.
    """
    late = sum(time < start for time, _ in timed)
    last, duration = timed[-1]
    step = max(1, duration)
    return timed[late:] + [(last + step * number, duration) for number in range(1, late + 1)]


Step = tuple[str, str]
"""The name of one of FFmpeg's filters, and its arguments."""


class _Filters:
    """A chain of FFmpeg's filters for frames of one size and format."""

    def __init__(self, frame: Any, steps: Sequence[Step], aspect: Fraction) -> None:
        self._graph = av.filter.Graph()
        source = {
            "video_size": f"{frame.width}x{frame.height}", "pix_fmt": frame.format.name,
            "time_base": frame.time_base or Fraction(1, 1000), "sar": aspect,
        }  # fmt: skip
        nodes = [self._graph.add("buffer", ":".join(f"{k}={v}" for k, v in source.items()))]
        nodes += [self._graph.add(name, arguments or None) for name, arguments in steps]
        nodes.append(self._graph.add("buffersink"))
        for node, following in zip(nodes, nodes[1:], strict=False):
            node.link_to(following)
        self._graph.configure()

    def push(self, frame: Any | None) -> Iterator[Any]:
        """Filter a frame, or None at the end, and yield the frames that come out."""
        self._graph.vpush(frame)
        while True:
            try:
                yield self._graph.vpull()
            except (av.BlockingIOError, av.EOFError):
                return


def _deinterlaced(frames: Iterator[Any]) -> Iterator[Any]:
    """Yield frames, deinterlaced by FFmpeg's yadif from the first interlaced one on."""
    filters: _Filters | None = None
    for frame in frames:
        if filters is None and not frame.interlaced_frame:
            yield frame
            continue
        if filters is None:
            filters = _Filters(frame, [("yadif", "deint=interlaced")], Fraction(1))
        yield from filters.push(frame)
    if filters is not None:
        yield from filters.push(None)


class _Renderer:
    """Turns decoded frames of one stream into upright pixels over a background."""

    def __init__(self, stream: Any, frame: Any, background: Colour) -> None:
        self._background = background
        self._format = (frame.width, frame.height, frame.format.name)
        alpha = any(part.is_alpha for part in frame.format.components)
        self._to = "rgba" if alpha or frame.format.has_palette else "rgb24"
        self._aspect = Fraction(stream.sample_aspect_ratio or 1)
        self._shape = _shaped(stream, frame)
        # The filter format converts as the program ffmpeg does; PyAV's own conversion takes other
        # neighbours for colours of more than 8 bits.
        self._colour = [("format", self._to)]
        hdr = _HDR.get(stream.codec_context.color_trc)
        if hdr is None:
            self._filters = _Filters(frame, [*self._shape, *self._colour], self._aspect)
            return
        self._colour = [(_HDR_FILTER, _TO_SCREEN), *self._colour]
        try:
            self._filters = self._shared(frame)
        except Exception as error:
            raise ValueError(
                f"it is HDR ({hdr}), which this version of av cannot map to the range of a screen "
                f"({error}); install av 16 or later, or convert it to BT.709"
            ) from error

    def _shared(self, frame: Any) -> _Filters:
        """Return the filters of this thread for frames like this one.

        FFmpeg takes seconds for the table with which the first frame is mapped.
        """
        steps = (*self._shape, *self._colour)
        key = (*self._format, frame.time_base, steps, self._aspect)
        cache: dict[Any, _Filters] = vars(_OF_THREAD).setdefault("filters", {})
        if key not in cache:
            cache.clear()
            cache[key] = _Filters(frame, steps, self._aspect)
        return cache[key]

    def picture(self, frame: Any) -> Picture:
        """Return the pixels of a frame, ``[H, W, 3]`` as bytes."""
        if (frame.width, frame.height) != self._format[:2]:
            raise ValueError("its frames differ in size")
        if frame.format.name != self._format[2]:
            frame = frame.reformat(format=self._format[2])
        pixels: Picture = next(self._filters.push(frame)).to_ndarray()
        return composited(pixels, self._background) if self._to == "rgba" else pixels


def _shaped(stream: Any, frame: Any) -> list[Step]:
    """Return the filters that make a frame upright, with square pixels."""
    widened = [("scale", "iw*sar:ih"), ("setsar", "1")]
    return _upright(frame) + (widened if (stream.sample_aspect_ratio or 1) != 1 else [])


def _size(stream: Any, frame: Any) -> tuple[int, int]:
    """Return the height and width of the upright picture of a frame, in square pixels."""
    steps = _shaped(stream, frame)
    if steps:
        frame = next(_Filters(frame, steps, Fraction(stream.sample_aspect_ratio or 1)).push(frame))
    return frame.height, frame.width


_UNIT = 1 << 16
"""One, in the fixed-point numbers of a display matrix."""
_LEVEL = math.radians(1)
"""An angle that is this near to a multiple of a right angle counts as one."""
_TRANSPOSED = {
    (True, True): "cclock_flip",
    (True, False): "clock",
    (False, True): "cclock",
    (False, False): "clock_flip",
}
"""Directions of the filter transpose by the signs of b and c of a display matrix."""


def _upright(frame: Any) -> list[Step]:
    """Return the filters that turn and mirror a frame as its display matrix says.

    They are those that the program ffmpeg puts before all others.
    """
    matrix = _display_matrix(frame)
    if matrix is None:
        return []
    # A point (x, y) is shown at (a x + c y, b x + d y).
    a, b, c, d = (matrix[i] for i in (0, 1, 3, 4))
    angle = math.atan2(b, a)
    if abs(math.sin(2 * angle)) > 2 * math.sin(_LEVEL):
        return [("rotate", str(angle))]
    if abs(b) > abs(a):
        return [("transpose", _TRANSPOSED[b > 0, c > 0])]
    return [("hflip", "")] * (a < 0) + [("vflip", "")] * (d < 0)


def _display_matrix(frame: Any) -> tuple[int, ...] | None:
    try:
        matrices = [x for x in frame.side_data if x.type.name == "DISPLAYMATRIX"]
    # PyAV refuses frames with side data that it does not know, such as EXIF.
    except ValueError:
        if not round(frame.rotation):
            return None
        turn = math.radians(frame.rotation)
        cosine = round(_UNIT * math.cos(turn))
        sine = round(_UNIT * math.sin(turn))
        return (cosine, -sine, 0, sine, cosine, 0, 0, 0, 1 << 30)
    return struct.unpack("=9i", bytes(matrices[0])[:36]) if matrices else None
