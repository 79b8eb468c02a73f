"""Files of clips of every kind, read as players show them, and the sentences about bad ones."""

import struct
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.data import pictures, video_files
from megatron_ext.video.data.clips import Clip
from megatron_ext.video.data.frames import decode, fit, probe
from megatron_ext.video.data.geometry import ClipShape, available_frames, subsampling
from tests.video.data import making

CODECS = {"libx264": "mp4", "libvpx": "webm", "libvpx-vp9": "webm"}


def as_pixels(made: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(made.copy()).permute(3, 0, 1, 2) / 127.5 - 1


@pytest.mark.parametrize(("codec", "kind"), CODECS.items())
def test_videos(tmp_path: Path, codec: str, kind: str) -> None:
    made = making.pictures(11)
    clip = Clip(str(making.write_video(tmp_path / f"a.{kind}", made, codec=codec)), "x")
    assert probe(clip) == ClipShape(11, 32, 32, 8.0)
    pixels = decode(clip, 1, 3, 4, (32, 32))
    assert pixels.dtype == torch.float32 and pixels.shape == (3, 4, 32, 32)
    assert (pixels - as_pixels(made[[1, 4, 7, 10]])).abs().mean() < 0.02
    # A neighbouring frame differs by more than the compression does.
    assert (pixels - as_pixels(made[[0, 3, 6, 9]])).abs().mean() > 0.06


def test_frames_without_times_are_shown_in_their_order(tmp_path: Path) -> None:
    """AVI has no times of frames, and those that FFmpeg guesses put frames out of order."""
    made = making.pictures(12)
    clip = Clip(str(making.write_video(tmp_path / "a.avi", made)), "x")
    assert probe(clip) == ClipShape(12, 32, 32, 8.0)
    for first, interval in ((0, 1), (1, 2)):
        pixels = decode(clip, first, interval, 6, (32, 32))
        # A neighbouring frame differs by 0.06.
        error = (pixels - as_pixels(made[first::interval][:6])).abs().mean(dim=(0, 2, 3))
        assert error.max() < 0.02


@pytest.mark.parametrize("kind", ["whole", "joined", "lossy", "begins anywhere"])
def test_recordings_of_broadcasts_are_shown_or_named(tmp_path: Path, kind: str) -> None:
    made = making.pictures(24, 32, 64)
    made[:, :16] = np.random.default_rng(0).integers(0, 255, (24, 16, 64, 3))
    path = tmp_path / "a.ts"
    options = {"crf": "5", "g": "6", "bf": "0", "sc_threshold": "0"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8, options=options)
        stream.height, stream.width, stream.pix_fmt = 32, 64, "yuv420p"
        for picture in made:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    packets = [path.read_bytes()[at : at + 188] for at in range(0, path.stat().st_size, 188)]
    clip = Clip(str(path), "x")
    if kind == "joined":
        path.write_bytes(b"".join(packets * 2))
        with pytest.raises(DataError, match=r"timestamps jump back by 2.88 s, as where files were"):
            probe(clip)
        return
    if kind == "lossy":
        del packets[packets_before(packets, 8) + 2]
        path.write_bytes(b"".join(packets))
        with pytest.raises(DataError, match=r"a.ts cannot be read \("):
            decode(clip, 0, 1, 24, (32, 64))
        return
    # A key frame stands at each sixth place.
    begin = 0 if kind == "whole" else 6
    if begin:
        path.write_bytes(b"".join(packets[packets_before(packets, 3) :]))
    shape = probe(clip)
    assert shape == ClipShape(24 - begin, 32, 64, 8.0)
    pixels = decode(clip, 0, 1, 24 - begin, (32, 64), shape=shape)[:, :, 16:]
    assert (pixels - as_pixels(made[begin:, 16:])).abs().mean(dim=(0, 2, 3)).max() < 0.02


def packets_before(packets: list[bytes], frame: int) -> int:
    """Return the number of packets of a transport stream before those of a frame."""
    # The first packet of a frame has the bit "payload unit start", and that of the video's PID.
    starts = [number for number, packet in enumerate(packets)
              if packet[1] & 0x40 and (packet[1] & 0x1F, packet[2]) == (1, 0)]  # fmt: skip
    return starts[frame]


def test_pictures_and_videos_are_known_by_their_content(tmp_path: Path) -> None:
    """Files of the web often have the ending of another kind."""
    made = making.pictures(5)
    for source, name, shape in (
        (making.write_video(tmp_path / "a.mp4", made), "b.jpg", ClipShape(5, 32, 32, 8.0)),
        (making.write_gif(tmp_path / "a.gif", made), "b.png", ClipShape(5, 32, 32, 10.0)),
        (making.write_folder(tmp_path / "a", made) / "000.png", "b.mp4", ClipShape(1, 32, 32, 0)),
    ):
        renamed = tmp_path / name
        source.rename(renamed)
        clip = Clip(str(renamed), "x")
        assert probe(clip) == shape
        pixels = decode(clip, 0, 1, shape.num_frames, (32, 32))
        assert (pixels - as_pixels(made[: shape.num_frames])).abs().mean() < 0.02


def test_pictures_of_parts_that_ffmpeg_does_not_join_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one tile of a phone's HEIC, or colours that nobody sees, would be trained."""
    rgba = np.dstack([making.pictures(1)[0], np.full((32, 32), 128, np.uint8)])
    Image.fromarray(rgba).save(tmp_path / "a.avif", quality=100)
    clip = Clip(str(tmp_path / "a.avif"), "x")
    shown = decode(clip, 0, 1, 1, (32, 32), background="black")
    assert (shown - as_pixels(rgba[None, ..., :3] // 2)).abs().mean() < 0.02
    monkeypatch.setattr(pictures.features, "check", lambda name: False)
    with pytest.raises(DataError, match=r"it is a picture of 2 parts, such as the tiles of a ph"):
        probe(clip)


def test_gifs_images_and_folders_of_images_are_exact(tmp_path: Path) -> None:
    made = making.pictures(6)
    clip = Clip(str(making.write_gif(tmp_path / "a.gif", made)), "x")
    assert probe(clip) == ClipShape(6, 32, 32, 10.0)
    torch.testing.assert_close(decode(clip, 0, 1, 6, (32, 32)), as_pixels(made), atol=1e-6, rtol=0)
    assert probe(Clip(clip.path, "x", fps=5.0)).fps == 5.0
    still = Clip(str(making.write_gif(tmp_path / "b.gif", making.pictures(1))), "x")
    assert probe(still) == ClipShape(1, 32, 32, 0.0)
    made = making.pictures(12)
    folder = making.write_folder(tmp_path / "v1.0", made, "f_{}.png")
    (folder / "._f_0.png").write_bytes(b"what macOS leaves")
    (folder / "notes.md").write_text("no image")
    clip = Clip(str(folder), "x")
    assert probe(clip) == ClipShape(12, 32, 32, 24.0)
    # f_10.png comes after f_9.png.
    torch.testing.assert_close(decode(clip, 0, 1, 12, (32, 32)), as_pixels(made))
    still = Clip(str(folder / "f_3.png"), "x")
    assert probe(still) == ClipShape(1, 32, 32, 0.0)
    torch.testing.assert_close(decode(still, 0, 1, 1, (32, 32)), as_pixels(made[3:4]))


def test_clips_that_are_turned_or_cut_by_an_edit_stand_as_players_show_them(tmp_path: Path) -> None:
    made = np.full((3, 32, 64, 3), 20, np.uint8)
    made[:, :16, :16] = 240
    path = making.write_video(tmp_path / "phone.mp4", made)
    making.lay_on_its_side(path)
    clip = Clip(str(path), "x")
    assert probe(clip) == ClipShape(3, 64, 32, 8.0)
    pixels = decode(clip, 0, 1, 3, (64, 32))
    # Turned clockwise, the upper left corner becomes the upper right one.
    wanted = as_pixels(np.stack([np.rot90(picture, -1) for picture in made]))
    assert (pixels - wanted).abs().mean() < 0.05
    made = making.pictures(11)
    whole = making.write_video(tmp_path / "whole.mp4", made)
    clip = Clip(str(making.hide_the_beginning(whole, tmp_path / "cut.mp4", 4)), "x")
    assert probe(clip) == ClipShape(7, 32, 32, 8.0)
    assert (decode(clip, 0, 1, 7, (32, 32)) - as_pixels(made[4:])).abs().mean() < 0.02


def test_fit_covers_and_cuts_the_middle() -> None:
    wide = torch.zeros(1, 20, 60, 3, dtype=torch.uint8)
    wide[:, :, 20:40] = 255
    torch.testing.assert_close(fit(wide, (20, 20)), torch.ones(3, 1, 20, 20))
    tall = wide.transpose(1, 2).contiguous()
    torch.testing.assert_close(fit(tall, (20, 20)), torch.ones(3, 1, 20, 20))
    grey = torch.full((2, 31, 47, 3), 100, dtype=torch.uint8)
    for size in ((16, 16), (64, 48), (16, 96)):
        wanted = torch.full((3, 2, *size), 100 / 127.5 - 1)
        torch.testing.assert_close(fit(grey, size), wanted, atol=1e-5, rtol=0)
    checkers = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    checkers[:, ::2] = 254
    # Reduced by two, rows average; without the filter they would be all black or all white.
    assert (fit(checkers, (16, 16))[:, :, 2:-2] + 0.004).abs().max() < 0.3


def damage(kind: str, folder: Path) -> Path:
    path, noise = folder / kind, np.random.default_rng(0)
    if kind == "folder":
        path.mkdir()
    elif kind == "cut.mp4":
        whole = making.write_video(folder / "whole.mp4", making.pictures(30, 64, 64), crf="0")
        path.write_bytes(whole.read_bytes()[:2000])
    elif kind == "cut.png":
        Image.fromarray(noise.integers(0, 255, (64, 64, 3), np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:60])
    elif not kind.startswith("missing"):
        content = {"empty.mp4": b"", "noise.webm": noise.bytes(3000), "text.jpg": b"no image"}
        path.write_bytes(content[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("empty.mp4", "Invalid data"),
        ("cut.mp4", "Invalid data"),
        ("noise.webm", "Invalid data"),
        ("missing.mp4", "No such file"),
        ("missing.png", "No such file"),
        ("text.jpg", "cannot identify image"),
        ("folder", "the folder holds no images"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, kind: str, why: str) -> None:
    path = damage(kind, tmp_path)
    for read in (probe, lambda clip: decode(clip, 0, 1, 1, (32, 32))):
        with pytest.raises(DataError, match=rf"^The clip \S+{kind} cannot be read \(.*{why}") as e:
            read(Clip(str(path), "x"))
        assert e.value.messages[0].endswith("mend the file or take its row out.")


def test_damage_that_headers_do_not_show(tmp_path: Path) -> None:
    path = damage("cut.png", tmp_path)
    assert probe(Clip(str(path), "x")).height == 64
    with pytest.raises(DataError, match=r"cut.png cannot be read \("):
        decode(Clip(str(path), "x"), 0, 1, 1, (32, 32))
    folder = making.write_folder(tmp_path / "mixed", making.pictures(2))
    Image.fromarray(making.pictures(1, 16, 16)[0]).save(folder / "002.png")
    with pytest.raises(DataError, match=r"mixed cannot be read \(its frames differ in size\)"):
        decode(Clip(str(folder), "x"), 0, 1, 3, (32, 32))
    for write in (making.write_video, making.write_folder):
        path = write(tmp_path / f"{write.__name__}.mp4", making.pictures(4))
        with pytest.raises(DataError, match=r"only 2 of 3 frames could be decoded"):
            decode(Clip(str(path), "x"), 0, 2, 3, (32, 32))


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_files, "av", None)
    with pytest.raises(ConfigError, match=r"needs the package av, .* install 'megatron-ext\[video"):
        probe(Clip(str(tmp_path / "a.mp4"), "x"))


def all_frames(path: Path, **options: Any) -> np.ndarray:
    """Return all frames of a clip at its own size and rate, ``[f, H, W, 3]`` from 0 to 255."""
    clip = Clip(str(path), "x")
    shape = probe(clip)
    size = shape.height, shape.width
    pixels = decode(clip, 0, 1, shape.num_frames, size, shape=shape, **options)
    return np.rint((pixels.permute(1, 2, 3, 0).numpy() + 1) * 127.5)


def write_exact(
    path: Path, frames: list[av.VideoFrame], *, rate: int = 24, tags: dict[str, int] | None = None
) -> Path:
    """Write frames without loss, in their own format and at their own times."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.width, stream.height = frames[0].width, frames[0].height
        stream.pix_fmt = frames[0].format.name
        for name, value in (tags or {}).items():
            setattr(stream.codec_context, name, value)
        for number, frame in enumerate(frames):
            if frame.pts is None:
                frame.pts, frame.time_base = number, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def numbered(path: Path, times: list[int], *, rate: int) -> Path:
    """Write frames at times, in frames of the rate; frame i is grey of the value 3 i."""
    frames = []
    for number, time in enumerate(times):
        grey = np.full((16, 16), 3 * number, np.uint8)
        frame = av.VideoFrame.from_ndarray(grey, format="gray")
        frame.pts, frame.time_base = time, Fraction(1, rate)
        frames.append(frame)
    return write_exact(path, frames, rate=rate)


def at_rate(path: Path, rate: float) -> list[int]:
    """Return the numbers of the frames of a clip at another rate."""
    clip = Clip(str(path), "x")
    shape = probe(clip)
    step = subsampling(shape.fps, 24, rate)[0]
    count = available_frames(shape, 24, rate)
    pixels = decode(clip, 0, step, count, (16, 16), shape=shape)
    return np.rint((pixels[0, :, 8, 8].numpy() + 1) * 127.5 / 3).astype(int).tolist()


def by_filter_fps(path: Path, rate: int) -> list[int]:
    """Return the numbers of the frames that FFmpeg's own filter fps takes."""
    graph = av.filter.Graph()
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        nodes = graph.add_buffer(template=stream), graph.add("fps", str(rate))
        sink = graph.add("buffersink")
        nodes[0].link_to(nodes[1])
        nodes[1].link_to(sink)
        graph.configure()
        found = []
        for frame in [*container.decode(stream), None]:
            graph.vpush(frame)
            try:
                while True:
                    found.append(int(graph.vpull().to_ndarray()[8, 8]) // 3)
            except (av.BlockingIOError, av.EOFError):
                pass
    return found


def test_a_variable_rate_is_followed_by_time_as_ffmpeg_does(tmp_path: Path) -> None:
    # One second of motion, then four pictures that stand for a quarter of a second.
    times = [*range(24), *range(24, 48, 6)]
    path = numbered(tmp_path / "a.mkv", times, rate=24)
    assert probe(Clip(str(path), "x")) == ClipShape(43, 16, 16, 24.0)
    for rate in (24, 48):
        wanted = by_filter_fps(path, rate)
        assert at_rate(path, rate)[: len(wanted) - 1] == wanted[:-1]


@pytest.mark.parametrize(("source", "rate"), [(15, 24), (24, 16), (30, 24), (25, 24)])
def test_other_rates_are_those_of_ffmpeg(tmp_path: Path, source: int, rate: int) -> None:
    path = numbered(tmp_path / "a.mkv", list(range(60)), rate=source)
    wanted = by_filter_fps(path, rate)
    assert abs(len(at_rate(path, rate)) - len(wanted)) <= 1
    assert at_rate(path, rate)[: len(wanted)] == wanted


def test_a_remuxed_clip_keeps_its_rate_although_its_header_is_off(tmp_path: Path) -> None:
    made = making.pictures(12)
    making.write_video(tmp_path / "a.mkv", made, fps=24)
    with av.open(str(tmp_path / "a.mkv")) as given, av.open(str(tmp_path / "a.mp4"), "w") as other:
        stream = given.streams.video[0]
        written = other.add_stream_from_template(stream)
        for packet in given.demux(stream):
            if packet.size:
                packet.stream = written
                other.mux(packet)
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert container.streams.video[0].average_rate != 24
    clip = Clip(str(tmp_path / "a.mp4"), "x")
    assert probe(clip) == ClipShape(12, 32, 32, 24.0)
    assert (decode(clip, 0, 1, 12, (32, 32)) - as_pixels(made)).abs().mean() < 0.02
    assert subsampling(24.02, 24) == (1, 24) and subsampling(24.3, 24) == (2, 12)


def test_blending_mixes_two_frames(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.mkv", list(range(20)), rate=30)
    clip = Clip(str(path), "x")
    pixels = decode(clip, 0, 1.25, 8, (16, 16), blend=True)
    wanted = torch.arange(8) * 1.25 * 3 / 127.5 - 1
    torch.testing.assert_close(pixels[0, :, 8, 8], wanted, atol=1e-5, rtol=0)


def test_the_rate_of_a_row_changes_the_speed_and_no_index(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.mkv", list(range(20)), rate=24)
    clip = Clip(str(path), "x", fps=12.0)
    assert probe(clip) == ClipShape(20, 16, 16, 12.0, 0.5)
    found = decode(clip, 3, 2, 5, (16, 16))[0, :, 8, 8]
    torch.testing.assert_close(found, torch.tensor([3, 5, 7, 9, 11]) * 3 / 127.5 - 1)


def test_the_default_or_else_the_largest_stream_is_the_video(tmp_path: Path) -> None:
    """Files of cameras also hold a small preview."""
    for default, size in ((None, 64), (0, 32), (2, 48)):
        path = tmp_path / f"{default}.mkv"
        with av.open(str(path), "w") as container:
            streams = []
            for number, side in enumerate((32, 64, 48)):
                stream = container.add_stream("ffv1", rate=8)
                stream.height, stream.width, stream.pix_fmt = side, side, "yuv420p"
                chosen = av.stream.Disposition.default if number == default else 0
                stream.disposition = chosen or av.stream.Disposition.dub
                streams.append((stream, making.pictures(2, side, side)))
            for stream, made in streams:
                for picture in made:
                    frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                    container.mux(stream.encode(frame.reformat(format="yuv420p")))
                container.mux(stream.encode())
        assert probe(Clip(str(path), "x")).height == size


class TurnedFrame:
    """A frame that a display matrix or EXIF data turn by degrees counterclockwise."""

    def __init__(self, degrees: float, kind: str) -> None:
        self.rotation = degrees
        self.kind = kind

    @property
    def side_data(self) -> list[Any]:
        if self.kind == "exif":
            raise ValueError("PyAV does not know this kind")
        turn = np.deg2rad(self.rotation)
        a, b = round(65536 * np.cos(turn)), round(65536 * np.sin(turn))
        matrix = struct.pack("=9i", a, -b, 0, b, a, 0, 0, 0, 1 << 30)

        class Matrix(bytes):
            type = SimpleNamespace(name="DISPLAYMATRIX")

        return [Matrix(matrix)]


@pytest.mark.parametrize("kind", ["matrix", "exif"])
@pytest.mark.parametrize(
    ("degrees", "steps"),
    [
        (0, []), (90, [("transpose", "cclock")]), (-90, [("transpose", "clock")]),
        (90.5, [("transpose", "cclock")]), (180, [("hflip", ""), ("vflip", "")]),
        (30, "counterclockwise"), (-30, "clockwise"),
    ],
)  # fmt: skip
def test_turns_by_any_angle_are_those_of_the_matrix(degrees: float, steps: Any, kind: str) -> None:
    found = video_files._upright(TurnedFrame(degrees, kind))
    if isinstance(steps, list):
        assert found == steps
        return
    ((name, angle),) = found
    # FFmpeg's filter rotate turns clockwise.
    assert name == "rotate" and float(angle) == pytest.approx(-np.deg2rad(degrees), abs=1e-3)


def test_damaged_frames_are_named_by_their_time() -> None:
    renderer: Any = SimpleNamespace(picture=lambda frame: "pixels")
    frame: Any = SimpleNamespace(is_corrupt=False, key_frame=True, time=1.25)
    assert video_files.LazyFrame(renderer, frame).picture() == "pixels"
    frame.is_corrupt = True
    with pytest.raises(ValueError, match=r"its frame at 1.25 s is damaged"):
        video_files.LazyFrame(renderer, frame).picture()


MATRICES = [(1, 0, 0, 1), (-1, 0, 0, 1), (1, 0, 0, -1), (-1, 0, 0, -1), (0, 1, 1, 0), (0, 1, -1, 0),
            (0, -1, 1, 0), (0, -1, -1, 0)]  # fmt: skip


@pytest.mark.parametrize("matrix", MATRICES)
def test_display_matrices_turn_and_mirror(
    tmp_path: Path, matrix: tuple[int, int, int, int]
) -> None:
    made = np.full((2, 32, 64, 3), 20, np.uint8)
    made[:, :16, :16] = 240
    path = making.write_video(tmp_path / "a.mp4", made)
    raw = all_frames(path)
    making.set_matrix(path, matrix)
    a, b, c, d = matrix
    rows, columns = np.mgrid[:32, :64]
    # A point (x, y) is shown at (a x + c y, b x + d y), moved into the picture.
    across, down = a * columns + c * rows, b * columns + d * rows
    shape = (32, 64) if a else (64, 32)
    wanted = np.zeros((2, *shape, 3))
    wanted[:, down - down.min(), across - across.min()] = raw
    assert np.abs(all_frames(path) - wanted).max() <= 2


def test_pixels_that_are_not_square_are_scaled(tmp_path: Path) -> None:
    ramp = np.linspace(20, 220, 32).astype(np.uint8)[None].repeat(32, 0)
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"crf": "1"})
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(3, 2)
        picture = np.repeat(ramp[..., None], 3, axis=-1)
        for _ in range(2):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    assert probe(Clip(str(path), "x")) == ClipShape(2, 32, 48, 8.0)
    place = (np.arange(48) + 0.5) / 1.5 - 0.5
    wanted = np.interp(place, np.arange(32), ramp[0].astype(float))
    assert np.abs(all_frames(path)[0, :, 2:-2, 1] - wanted[2:-2]).max() <= 3


def test_interlaced_clips_are_deinterlaced(tmp_path: Path) -> None:
    # Two fields of a moving bar in each frame.
    fields = making.pictures(8, 64, 64)
    woven = fields[::2].copy()
    woven[:, 1::2] = fields[1::2, 1::2]
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        options = {"crf": "1", "x264-params": "tff=1"}
        stream = container.add_stream("libx264", rate=8, options=options)
        stream.height, stream.width, stream.pix_fmt = 64, 64, "yuv420p"
        for picture in woven:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())

    def combs(frames: np.ndarray) -> float:
        grey = frames.astype(float).mean(-1)
        return float(np.abs(2 * grey[:, 1:-1] - grey[:, :-2] - grey[:, 2:]).mean())

    found = all_frames(path)
    assert len(found) == 4 and combs(woven) > 9 and combs(found) < 2
    # The lines of the first field stay.
    assert np.abs(found[1:3, 8:-8:2] - woven[1:3, 8:-8:2]).mean() < 6


def to_hdr(sdr: np.ndarray, transfer: str) -> np.ndarray:
    """Return RGB of BT.709 (0 to 1, white 203 cd/m²) as PQ or HLG of BT.2020, also 0 to 1."""
    to_2020 = np.array([[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114],
                        [0.0164, 0.0880, 0.8956]])  # fmt: skip
    light = (sdr**2.4) @ to_2020.T * 203
    if transfer == "PQ":
        power = (light / 10000) ** (2610 / 16384)
        upper = 3424 / 4096 + 2413 / 128 * power
        return (upper / (1 + 2392 / 128 * power)) ** (2523 / 32)
    # The inverse of a display of 1000 cd/m², without its dependence of the colour.
    scene = (light / 1000) ** (1 / 1.2)
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(
        scene <= 1 / 12, np.sqrt(3 * scene), a * np.log(np.maximum(12 * scene - b, 1e-9)) + c
    )


def hdr_video(path: Path, sdr: np.ndarray, transfer: str) -> Path:
    """Write two frames of 10 bits with the tags of HDR."""
    red, green, blue = np.moveaxis(to_hdr(sdr, transfer), -1, 0)
    luma = 0.2627 * red + 0.6780 * green + 0.0593 * blue
    planes = [
        64 + 876 * luma,
        512 + 896 * (blue - luma) / 1.8814,
        512 + 896 * (red - luma) / 1.4746,
    ]
    frames = []
    for _ in range(2):
        frame = av.VideoFrame(sdr.shape[1], sdr.shape[0], "yuv444p10le")
        for plane, values in zip(frame.planes, planes, strict=True):
            padded = np.zeros((sdr.shape[0], plane.line_size // 2), "<u2")
            padded[:, : sdr.shape[1]] = np.rint(values)
            plane.update(padded.tobytes())
        frames.append(frame)
    tags = {"color_primaries": 9, "color_trc": {"PQ": 16, "HLG": 18}[transfer]}
    return write_exact(path, frames, tags=tags | {"colorspace": 9, "color_range": 1})


@pytest.mark.slow  # FFmpeg makes a table for each kind of HDR, which takes seconds.
@pytest.mark.parametrize("transfer", ["PQ", "HLG"])
def test_hdr_is_mapped_to_the_range_of_a_screen(tmp_path: Path, transfer: str) -> None:
    sdr = np.zeros((32, 64, 3))
    for number, colour in enumerate(
        [(0.6, 0.2, 0.2), (0.2, 0.5, 0.3), (0.3, 0.3, 0.6), (0.5,) * 3]
    ):
        sdr[:, 16 * number : 16 * number + 16] = colour
    path = hdr_video(tmp_path / "a.mkv", sdr, transfer)
    with av.open(str(path)) as container:
        raw = next(container.decode(video=0)).to_ndarray(format="rgb24")

    def centres(picture: np.ndarray) -> np.ndarray:
        return picture[16, 8::16].astype(float)

    def saturation(picture: np.ndarray) -> float:
        return float(np.ptp(centres(picture)[:3], axis=-1).mean())

    wanted, found = 255 * sdr, all_frames(path)[0]
    # Washed out without it; with it colours are as strong as before, and about as light.
    assert saturation(raw) < 0.7 * saturation(wanted)
    assert abs(saturation(found) / saturation(wanted) - 1) < 0.25
    assert np.abs(centres(found) - centres(wanted)).max() < 40


def test_hdr_that_this_ffmpeg_cannot_map_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hdr_video(tmp_path / "a.mkv", np.full((16, 16, 3), 0.5), "PQ")
    monkeypatch.setattr(video_files, "_TO_SCREEN", "no_such_option=1")
    with pytest.raises(DataError, match=r"it is HDR \(PQ\), which this version of av cannot map .*;"
                       r" install av 16 or later, or convert it to BT.709"):  # fmt: skip
        probe(Clip(str(path), "x"))


def test_hdr_that_only_the_container_tells_is_named(tmp_path: Path) -> None:
    """Players show it as HDR, but decoders forget it."""
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w", options={"movflags": "write_colr"}) as container:
        stream = container.add_stream("libx264", rate=8)
        stream.height, stream.width, stream.pix_fmt = 16, 32, "yuv420p"
        for name in ("color_primaries", "color_trc", "colorspace"):
            setattr(stream.codec_context, name, 1)
        container.mux(stream.encode(av.VideoFrame(32, 16, "yuv420p")))
        container.mux(stream.encode())
    content = path.read_bytes()
    box = content.index(b"colrnclx") + 8
    path.write_bytes(content[:box] + b"\0\x09\0\x10\0\x09" + content[box + 6 :])
    with pytest.raises(DataError, match=r"it is HDR \(PQ\) by the tags of the file, which the "):
        probe(Clip(str(path), "x"))


def test_transparent_clips_show_the_background(tmp_path: Path) -> None:
    made = np.zeros((16, 32, 4), np.uint8)
    made[:, :16] = (200, 40, 80, 255)
    made[:, 16:] = (0, 255, 0, 0)
    frames = [av.VideoFrame.from_ndarray(made, format="rgba") for _ in range(2)]
    write_exact(tmp_path / "a.mkv", [frame.reformat(format="bgra") for frame in frames])
    with av.open(str(tmp_path / "b.webm"), "w") as container:
        stream = container.add_stream("libvpx-vp9", rate=8, options={"crf": "4", "b": "0"})
        stream.height, stream.width, stream.pix_fmt = 16, 32, "yuva420p"
        for frame in (av.VideoFrame.from_ndarray(made, format="rgba") for _ in range(2)):
            container.mux(stream.encode(frame.reformat(format="yuva420p")))
        container.mux(stream.encode())
    for name, off in (("a.mkv", 0), ("b.webm", 12)):
        for background, colour in (("white", (255,) * 3), ("#102030", (16, 32, 48))):
            found = all_frames(tmp_path / name, background=background)[0]
            assert np.abs(found[:, 18:] - colour).max() <= off, name
            assert np.abs(found[:, :14] - (200, 40, 80)).max() <= max(2, off), name


def test_animated_pictures_are_clips_by_their_durations(tmp_path: Path) -> None:
    images = [Image.fromarray(picture) for picture in making.pictures(4)]
    last = [100, 100, 300, 100]
    path = tmp_path / "a.webp"
    many = {"save_all": True, "append_images": images[1:], "lossless": True}
    images[0].save(path, duration=last, **many)
    clip = Clip(str(path), "x")
    assert probe(clip) == ClipShape(6, 32, 32, 10.0)
    wanted = as_pixels(making.pictures(4)[[0, 1, 2, 2, 2, 3]])
    torch.testing.assert_close(decode(clip, 0, 1, 6, (32, 32)), wanted)
    # The rate of the row changes the speed, and no frame.
    slow = Clip(str(path), "x", fps=5.0)
    assert probe(slow) == ClipShape(6, 32, 32, 5.0, 0.5)
    torch.testing.assert_close(decode(slow, 0, 1, 6, (32, 32)), wanted)
    torch.testing.assert_close(decode(slow, 1, 2, 3, (32, 32)), wanted[:, 1::2])
    # A last frame that stays counts several times.
    images[0].save(path, duration=[100, 300, 100, 300], **many)
    assert probe(clip) == ClipShape(8, 32, 32, 10.0)
    wanted = as_pixels(making.pictures(4)[[0, 1, 1, 1, 2, 3, 3, 3]])
    torch.testing.assert_close(decode(clip, 0, 1, 8, (32, 32)), wanted)


def test_too_little_memory_is_no_damage_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else clips would be left out of a dataset where memory runs out."""
    path = making.write_folder(tmp_path / "a", making.pictures(1)) / "000.png"

    def fail(*given: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(pictures, "picture_size", fail)
    monkeypatch.setattr(pictures, "read_picture", fail)
    for read in (probe, lambda clip: decode(clip, 0, 1, 1, (32, 32), shape=ClipShape(1, 9, 9, 0))):
        with pytest.raises(MemoryError):
            read(Clip(str(path), "x"))


def write_sound(path: Path, cover: bool) -> Path:
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=8000, layout="mono")
        picture = container.add_stream("mjpeg", rate=1) if cover else None
        if picture is not None:
            picture.height, picture.width, picture.pix_fmt = 32, 32, "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic
            frame = av.VideoFrame.from_ndarray(making.pictures(1)[0], format="rgb24")
            container.mux(picture.encode(frame.reformat(format="yuvj420p")))
            container.mux(picture.encode())
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        samples.sample_rate = 8000
        container.mux(sound.encode(samples))
        container.mux(sound.encode())
    return path


def test_files_of_sound_are_named(tmp_path: Path) -> None:
    for name, cover, why in (
        ("a.m4a", False, "it has no video, only sound"),
        ("b.mp4", True, "it has no video, only sound and a cover picture"),
    ):
        path = write_sound(tmp_path / name, cover)
        with pytest.raises(DataError, match=rf"{name} cannot be read \({why}\); mend"):
            probe(Clip(str(path), "x"))


def test_names_that_look_like_protocols_or_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = making.write_video(tmp_path / "a.mp4", making.pictures(3))
    for name in ("12:30:00.mp4", "100%d.mp4", "日本 é'\"q.mp4"):
        Path(name).write_bytes(made.read_bytes())
        assert probe(Clip(name, "x")) == ClipShape(3, 32, 32, 8.0)


def test_frames_that_change_their_size_are_named(tmp_path: Path) -> None:
    parts = [making.write_video(tmp_path / f"{size}.h264", making.pictures(2, size, size))
             for size in (32, 48)]  # fmt: skip
    (tmp_path / "a.h264").write_bytes(b"".join(part.read_bytes() for part in parts))
    with pytest.raises(DataError, match=r"a.h264 cannot be read \(its frames differ in size\)"):
        decode(Clip(str(tmp_path / "a.h264"), "x"), 0, 1, 4, (32, 32))


LONG = {
    "closed.mp4": ("libx264", {"g": "24", "bf": "2"}),
    "open.mkv": ("libx264", {"x264-params": "keyint=24:min-keyint=24:open-gop=1:bframes=3"}),
    "one_key.mp4": ("libx264", {"g": "1000"}),
    "broadcast.ts": ("mpeg2video", {"g": "12", "bf": "2"}),
    "web.webm": ("libvpx-vp9", {"g": "20", "cpu-used": "8", "deadline": "realtime"}),
    "raw.h264": ("libx264", {"g": "24"}),
}


@pytest.mark.parametrize("name", LONG)
def test_the_middle_of_a_long_video_is_sought_and_the_same(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, options = LONG[name]
    path = tmp_path / name
    noise = np.random.default_rng(0).integers(0, 255, (288, 4, 4, 3), np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=24, options=options)
        stream.height, stream.width, stream.pix_fmt = 64, 64, "yuv420p"
        for small in noise:
            picture = small.repeat(16, 0).repeat(16, 1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    decoded, real = [0], video_files._decoded

    def counted(container: Any, stream: Any) -> Any:
        for frame in real(container, stream):
            decoded[0] += 1
            yield frame

    monkeypatch.setattr(video_files, "_decoded", counted)
    clip = Clip(str(path), "x")
    shape = probe(clip)
    for first in (120, 200.5, 270):
        decoded[0] = 0
        near = decode(clip, first, 3, 5, (32, 32), shape=shape)
        count = decoded[0]
        with monkeypatch.context() as patch:
            patch.setattr(video_files, "_SEEK_AFTER", float("inf"))
            assert decode(clip, first, 3, 5, (32, 32), shape=shape).equal(near)
        # From the key frame before the second before the first frame, where there is one.
        assert count < 85 or name in ("one_key.mp4", "raw.h264")
