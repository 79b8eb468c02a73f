"""Reads the frames of video files through FFmpeg, as a player shows them.

A player rotates and mirrors frames by their display matrix, scales pixels that are not square,
deinterlaces, maps HDR to the range of a screen, and shows a background under transparent parts. We
do all this by filters of FFmpeg, which are chosen by the properties of the stream and its frames.
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
"""Kinds of streams that are not the video but pictures, such as the cover of an album."""
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""Decoders that read transparency, by codec; FFmpeg's own decoders of these codecs ignore it."""
_STILLS = ("heic", "heix", "heim", "heis", "mif1", "avif")
"""Values of ``major_brand`` in the header of HEIF and AVIF files that hold a still picture."""
_HDR = {16: "PQ", 18: "HLG"}
"""The names of HDR's transfer functions, by their number in ITU-T H.273."""
_HDR_FILTER = "scale"
_OF_THREAD = threading.local()
_TO_SCREEN = "out_transfer=bt709:out_primaries=bt709:out_color_matrix=bt709"


@dataclass(frozen=True)
class VideoFacts:
    """The number, size and rate of the frames of a video file.

    Attributes:
        num_frames: number of frames at the rate ``fps``; a frame that is shown longer is counted
            several times.
        height, width: size of the upright picture, in square pixels.
        fps: frame rate, 0 if there is only one frame; if the rate varies, the rate at which most
            frames follow one another.
    """

    num_frames: int
    height: int
    width: int
    fps: float


def video_facts(path: ClipFile) -> VideoFacts:
    """Return number, size and rate of frames, from the packets of the stream and the first frame.

    A file without video raises ValueError; a file that FFmpeg cannot read raises FFmpeg's error.
    """
    with _opened(path) as (container, stream):
        by_decoding = _lacks_times(container)
        timed = [
            (packet.dts if by_decoding else packet.pts, packet.duration or 0)
            for packet in _packets(container, stream)
            # An edited mp4 may have packets before its beginning, which are not shown.
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
            _Renderer(stream, first, (0, 0, 0))  # Raises if it cannot map the HDR colours.
        height, width = _size(stream, first)
        start = first.pts
    if None in (pts for pts, _ in timed) or start is None:
        # Streams without timestamps, such as raw H.264, have only a rate in their header.
        fps = float(rates[-1]) if rates and len(timed) > 1 else 0.0
        return VideoFacts(len(timed), height, width, fps)
    if by_decoding:
        timed = _behind(timed, start)
    # After a cut within an open group of pictures, the first packets cannot be decoded: skip them.
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
    """Yield (time, duration, frame) of each frame.

    Times are in frames of the rate ``fps``, from the first frame that can be decoded. Frames well
    before the time ``begin`` may be skipped by seeking, which is much faster in a long video.
    ``background`` shows where frames are transparent.
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
            # Older versions of PyAV lack it. Then the last frame is as long as the others.
            ticks = getattr(frame, "duration", None) or 0
            duration = float(ticks * frame.time_base) if frame.time_base else 0.0
            yield (time - start) * fps, duration * fps, LazyFrame(renderer, frame)


def scene_times(path: ClipFile, threshold: float) -> list[float]:
    """Return the times at which scenes begin, in seconds after the first frame that is decoded.

    A scene begins where FFmpeg's filter select finds a change of more than ``threshold``, a number
    between 0 and 1. The whole file is decoded. A file without video raises ValueError; a file that
    FFmpeg cannot read raises FFmpeg's error.
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
                # Small frames give the same scenes in a fraction of the time.
                small = ("scale", f"w=min(iw\\,{_SCENE_WIDTH}):h=-2")
                change = ("select", f"gt(scene\\,{threshold})")
                filters = _Filters(frame, [small, change], Fraction(1))
            times += [float(x.pts * x.time_base - begin) for x in filters.push(frame)]
        if filters is not None:
            times += [float(x.pts * x.time_base - begin) for x in filters.push(None)]
    return times


_SCENE_WIDTH = 320
_SEEK_AFTER = 4.0
"""A seek is tried only for a frame later than this time in seconds.

For an earlier frame, the video is decoded from the start."""
_SEEK_BEFORE = (1.0, 8.0)
"""How many seconds before a wanted frame a seek aims, in the first and in the second try.

The second try is for recorded broadcasts, in which a seek may end after the wanted frame."""
_LATEST = Fraction(1, 2)
"""The largest step back from the decoding time of one packet to that of the next, in seconds.

Cheap recorders write some times out of order. A larger step means that files were joined."""
_FILTERED_BEFORE = 0.25
"""The least number of seconds to decode before a wanted frame, since filters use earlier frames."""


def _near(container: Any, stream: Any, seconds: float) -> Iterator[Any] | None:
    """Return an iterator over the stream's frames that skips most of those before ``seconds``.

    It yields the first frame of the stream, and then all frames from a key frame shortly before
    ``seconds`` on. This time is counted from the first frame. Return None if seeking is not
    possible, or finds no suitable key frame; the caller must then open the file again.
    """
    first = next(_decoded(container, stream), None)
    if first is None or first.pts is None or not first.time_base:
        return None
    if _lacks_times(container) and stream.codec_context.has_b_frames:
        # Such frames are timed by their packets, and the delay may differ after a seek.
        return None
    latest = first.pts + (seconds - _FILTERED_BEFORE) / first.time_base
    for before in _SEEK_BEFORE:
        try:
            container.seek(first.pts + int((seconds - before) / first.time_base), stream=stream)
        except av.FFmpegError:
            return None
        frames = _decoded(container, stream)
        # Skip frames before the key frame: they may refer to frames that were not decoded.
        key = next((frame for frame in frames if frame.key_frame), None)
        if key is not None and key.pts is not None and first.pts < key.pts <= latest:
            return chain([first, key], frames)
    return None


@dataclass(frozen=True)
class LazyFrame:
    """A decoded frame that is converted to pixels only when `picture` is called."""

    renderer: _Renderer
    frame: Any

    def picture(self) -> Picture:
        """Return the pixels, ``[H, W, 3]`` uint8; ValueError is raised if the frame is damaged."""
        if self.frame.is_corrupt:
            raise ValueError(f"its frame at {self.frame.time or 0:.2f} s is damaged")
        return self.renderer.picture(self.frame)


@contextmanager
def _opened(path: ClipFile) -> Iterator[tuple[Any, Any]]:
    """Open a file; yield (its container, its video stream).

    The video stream is the default stream, or else the largest one, but not a cover picture.
    """
    # Without "file:" FFmpeg would take "12:" in "12:30:00.mp4" for the name of a protocol.
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
    """Decode a stream and yield its frames, with transparency if they have it."""
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
    """Yield the packets of a stream, and an empty packet at the end.

    ValueError is raised for files that were joined without new timestamps. A player would show the
    second file after the first, but their timestamps overlap.
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
    """Decode packets by ``decode`` and yield their frames; ignore errors before the first frame.

    If no frame can be decoded, the first error is raised. Errors before the first frame are normal:
    a recorded broadcast can begin in the middle of a group of pictures, and players show it from
    the first frame that can be decoded.
    """
    begun = False
    first_error: Exception | None = None
    for packet in packets:
        if packet.size == 0 and packet.dts is not None:
            # Screen recorders write an empty packet if the picture has not changed.
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
    """Tell whether the format of a file, such as AVI, stores no times of frames.

    FFmpeg then guesses the times, and wrongly if frames are not stored in display order.
    """
    return bool(container.format.name == "avi")


def _in_order(frames: Iterator[Any]) -> Iterator[Any]:
    """Set the time of each frame of a file that stores no times of frames, and yield the frame.

    The time is that of the packet after which the decoder returned the frame. If the packet has no
    time, or one that is not later than the previous frame's, the frame begins where that one ends.
    """
    last: int | None = None
    for frame in frames:
        if frame.dts is not None and (last is None or frame.dts > last):
            frame.pts = frame.dts
        elif last is not None:
            frame.pts = last + max(1, getattr(frame, "duration", None) or 0)
        last = frame.pts
        yield frame


def _behind(timed: list[tuple[int, int]], start: int) -> list[tuple[int, int]]:
    """Return (time, duration) of each frame of a file that stores no times of frames.

    The decoder is some packets late: it returns the first frame at packet k (counted from 0), and
    `_in_order` gives a frame the time of the packet at which it is returned. The last k frames
    follow after the last packet; their times are computed from its time and duration.

    Args:
        timed: (time, duration) of each packet of the file.
        start: time of the first frame; k is the number of packets with earlier times.
    """
    late = sum(time < start for time, _ in timed)
    last, duration = timed[-1]
    step = max(1, duration)
    return timed[late:] + [(last + step * number, duration) for number in range(1, late + 1)]


Step = tuple[str, str]
"""The name of one of FFmpeg's filters, and its arguments."""


class _Filters:
    """A chain of FFmpeg's filters, ``steps``, for frames of the size and format of ``frame``.

    ``aspect`` is width divided by height of one pixel.
    """

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
        """Pass a frame, or None for the end, through the filters; yield the resulting frames."""
        self._graph.vpush(frame)
        while True:
            try:
                yield self._graph.vpull()
            except (av.BlockingIOError, av.EOFError):
                return


def _deinterlaced(frames: Iterator[Any]) -> Iterator[Any]:
    """Yield frames; from the first interlaced frame on, deinterlace them by FFmpeg's yadif."""
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
    """Turns decoded frames of one stream into upright pixels, over ``background`` if transparent.

    ``frame`` is the first frame, which determines the filters.
    """

    def __init__(self, stream: Any, frame: Any, background: Colour) -> None:
        self._background = background
        self._format = (frame.width, frame.height, frame.format.name)
        alpha = any(part.is_alpha for part in frame.format.components)
        self._to = "rgba" if alpha or frame.format.has_palette else "rgb24"
        self._aspect = Fraction(stream.sample_aspect_ratio or 1)
        self._shape = _shaped(stream, frame)
        # Use the filter "format", which converts like the program ffmpeg. PyAV's own conversion
        # interpolates colours of more than 8 bits differently.
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
        """Return filters for frames like ``frame``, from the cache of this thread if it has them.

        The filters are cached because FFmpeg takes seconds to compute the table for HDR colours.
        """
        steps = (*self._shape, *self._colour)
        key = (*self._format, frame.time_base, steps, self._aspect)
        cache: dict[Any, _Filters] = vars(_OF_THREAD).setdefault("filters", {})
        if key not in cache:
            cache.clear()
            cache[key] = _Filters(frame, steps, self._aspect)
        return cache[key]

    def picture(self, frame: Any) -> Picture:
        """Return the pixels of a frame, ``[H, W, 3]`` uint8."""
        if (frame.width, frame.height) != self._format[:2]:
            raise ValueError("its frames differ in size")
        if frame.format.name != self._format[2]:
            frame = frame.reformat(format=self._format[2])
        pixels: Picture = next(self._filters.push(frame)).to_ndarray()
        return composited(pixels, self._background) if self._to == "rgba" else pixels


def _shaped(stream: Any, frame: Any) -> list[Step]:
    """Return the filters that make a frame upright and its pixels square."""
    widened = [("scale", "iw*sar:ih"), ("setsar", "1")]
    return _upright(frame) + (widened if (stream.sample_aspect_ratio or 1) != 1 else [])


def _size(stream: Any, frame: Any) -> tuple[int, int]:
    """Return the height and width of the upright picture of a frame, in square pixels."""
    steps = _shaped(stream, frame)
    if steps:
        frame = next(_Filters(frame, steps, Fraction(stream.sample_aspect_ratio or 1)).push(frame))
    return frame.height, frame.width


_UNIT = 1 << 16
"""The number that stands for 1 in the fixed-point numbers of a display matrix."""
_LEVEL = math.radians(1)
"""The largest difference by which a rotation is rounded to a multiple of 90 degrees, in radians."""
_TRANSPOSED = {
    (True, True): "cclock_flip",
    (True, False): "clock",
    (False, True): "cclock",
    (False, False): "clock_flip",
}
"""The argument of FFmpeg's filter transpose for a display matrix that swaps height and width.

The keys are (b > 0, c > 0), for a matrix that shows the point (x, y) at (a x + c y, b x + d y)."""


def _upright(frame: Any) -> list[Step]:
    """Return the filters that rotate and mirror a frame by its display matrix.

    The program ffmpeg inserts the same filters.
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
