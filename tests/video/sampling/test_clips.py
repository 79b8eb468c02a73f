"""Files of sampled clips and long videos, read back."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.video.sampling import clips as module
from megatron_ext.video.sampling.clips import CONTACT_SHEET, LIST, write_clips
from megatron_ext.video.sampling.mp4 import Mp4Writer, as_bytes
from megatron_ext.video.sampling.requests import ClipRequest
from megatron_ext.video.streaming.long_videos import LongVideoWriter, NotFiniteError

ASKED = [ClipRequest("a red square moves left"), ClipRequest("Größe " * 40, "a.png", "i2v_head")]


def smooth(num_clips: int = 2, frames: int = 9, height: int = 32, width: int = 48) -> Tensor:
    """Return slow waves, which H.264 hardly changes, ``[P, 3, f, H, W]``."""
    axes = (torch.linspace(0, 3, size) for size in (frames, height, width))
    t, y, x = torch.meshgrid(*axes, indexing="ij")
    phases = torch.arange(num_clips * 3).reshape(num_clips, 3, 1, 1, 1)
    return 0.8 * torch.sin(t + 0.7 * y + 0.5 * x + phases)


def read(path: Path) -> tuple[np.ndarray[Any, Any], float]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert stream.average_rate is not None
        return np.stack(frames), float(stream.average_rate)


def test_clips_are_playable_and_the_list_says_how_they_came_about(tmp_path: Path) -> None:
    pixels = smooth()
    pixels[0, 0, 0, 0, 0] = 7.0
    write_clips(tmp_path / "out", pixels, ASKED, fps=12, seed=5, facts={"iteration": 40})
    for i in range(2):
        frames, fps = read(tmp_path / "out" / f"sample_00{i}.mp4")
        assert frames.shape == (9, 32, 48, 3) and fps == 12
        want = (pixels[i].permute(1, 2, 3, 0).clamp(-1, 1).numpy() + 1) * 127.5
        assert np.abs(frames - want).mean() < 4
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"sample_000.mp4", "sample_001.mp4", CONTACT_SHEET, LIST}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    rows = [json.loads(line) for line in (tmp_path / "out" / LIST).read_text("utf-8").splitlines()]
    common = {"seed": 5, "num_frames": 9, "height": 32, "width": 48, "fps": 12, "iteration": 40}
    wanted = {"path": "sample_001.mp4", "number": 1, "text": ASKED[1].text, "motion": None}
    wanted |= {"negative_prompt": None, "steps": None}
    assert rows[1] == {**wanted, "mode": "i2v_head", "reference": "a.png", **common}
    assert rows[0]["text"] == "a red square moves left" and rows[0]["reference"] is None


def test_the_contact_sheet_has_a_row_for_each_clip(tmp_path: Path) -> None:
    pixels = torch.full((2, 3, 9, 32, 48), -1.0)
    pixels[1, 0, -1] = 1.0
    write_clips(tmp_path / "out", pixels, ASKED, fps=12, seed=5)
    with Image.open(tmp_path / "out" / CONTACT_SHEET) as picture:
        sheet = np.asarray(picture)
    row, column = 20 + 32 + 4, 48 + 4
    assert sheet.shape == (2 * row, 4 + 8 * column, 3)
    # The first and the last frame are among the eight.
    assert (sheet[20:52, 4:52] == 0).all() and (sheet[20:52, -52:-4] == 0).all()
    assert (sheet[row + 20 : row + 52, 4:52] == 0).all()
    assert (sheet[row + 20 : row + 52, -52:-4] == (255, 0, 0)).all()
    for title in (sheet[:20], sheet[row : row + 20]):
        assert title.min() < 100 and (title[:, -4:] == 255).all()
    # Large frames are reduced, and titles as long as fit: a character more would not.
    pen, font = ImageDraw.Draw(Image.new("RGB", (1, 1))), ImageFont.load_default(size=12)
    for width in (60, 200):
        shown = module._shortened("abc " * 40, lambda t: pen.textlength(t, font) <= width)  # noqa: B023
        longer = ("abc " * 40).strip()[: len(shown) - 2] + "..."
        assert shown.endswith("...") and pen.textlength(longer, font) > width
        assert pen.textlength(shown, font) <= width
    assert module._shortened(" two\nlines ", lambda _: True) == "two lines"
    write_clips(tmp_path / "large", smooth(1, 3, 512, 256), ASKED[:1], fps=12, seed=5)
    with Image.open(tmp_path / "large" / CONTACT_SHEET) as picture:
        assert picture.size == (4 + 3 * (128 + 4), 20 + 256 + 4)


def test_clips_of_several_sizes_and_seeds_are_written_together(tmp_path: Path) -> None:
    requests = [ClipRequest("one", seed=0, steps=4), ClipRequest("two", size=(16, 64))]
    pixels = [smooth(1)[0], smooth(1, height=16, width=64)[0]]
    facts = {"steps": 50}
    write_clips(tmp_path / "out", pixels, requests, fps=29.97, seed=5, facts=facts)
    frames, fps = read(tmp_path / "out" / "sample_001.mp4")
    assert frames.shape == (9, 16, 64, 3) and fps == pytest.approx(29.97, abs=1e-3)
    rows = [json.loads(line) for line in (tmp_path / "out" / LIST).read_text("utf-8").splitlines()]
    names = ("seed", "steps", "height", "width")
    assert not any("size" in row for row in rows)
    assert [[row[x] for x in names] for row in rows] == [[0, 4, 32, 48], [5, 50, 16, 64]]
    with Image.open(tmp_path / "out" / CONTACT_SHEET) as picture:
        assert picture.size == (4 + 8 * (64 + 4), 2 * 24 + 32 + 16)


def test_clips_of_one_frame_are_pictures(tmp_path: Path) -> None:
    """Samples with such pictures are replaced by others."""
    pixels = smooth(2, 1, 31, 33)
    for _ in range(2):
        write_clips(tmp_path / "out", pixels, ASKED, fps=1, seed=5)
    files = ["sample_000.png", "sample_001.png"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*files, CONTACT_SHEET, LIST}
    rows = [json.loads(line) for line in (tmp_path / "out" / LIST).read_text("utf-8").splitlines()]
    assert [(row["path"], row["num_frames"]) for row in rows] == [(name, 1) for name in files]
    with Image.open(tmp_path / "out" / files[1]) as picture:
        wanted = (pixels[1, :, 0].permute(1, 2, 0).clamp(-1, 1).numpy() + 1) * 127.5
        assert np.abs(np.asarray(picture) - wanted).max() <= 0.51


def test_odd_sizes_play(tmp_path: Path) -> None:
    pixels = smooth(1, 3, 31, 33)
    write_clips(tmp_path / "out", pixels, ASKED[:1], fps=1, seed=5)
    found, fps = read(tmp_path / "out" / "sample_000.mp4")
    assert found.shape == (3, 32, 34, 3) and fps == 1
    # What is added to a side continues the picture.
    grown = found.astype(int)
    assert np.abs(grown[:, -1] - grown[:, -2]).max() < 30
    assert np.abs(grown[:, :, -1] - grown[:, :, -2]).max() < 30


@pytest.mark.parametrize(
    ("size", "matrix"), [((720, 32), 1), ((32, 1280), 1), ((718, 32), 6), ((32, 1278), 6)]
)
def test_colours_are_tagged_and_encoded_as_tagged(
    tmp_path: Path, size: tuple[int, int], matrix: int
) -> None:
    colour = np.array([200, 50, 120])
    with closing(Mp4Writer(tmp_path / "12:30.mp4", 23.976)) as writer:
        writer.append(np.broadcast_to(colour.astype(np.uint8), (2, *size, 3)))
    with av.open(f"file:{tmp_path / '12:30.mp4'}") as container:
        stream = container.streams.video[0]
        assert float(stream.average_rate or 0) == pytest.approx(23.976, abs=1e-3)
        context, frame = stream.codec_context, next(container.decode(stream))
    tags = (context.color_primaries, context.color_trc, context.colorspace, context.color_range)
    assert tags == (1, 1, matrix, 1)
    # The luma of the matrix, in 16 to 235.
    weights = {1: (0.2126, 0.7152, 0.0722), 6: (0.299, 0.587, 0.114)}[matrix]
    luma = 16 + 219 * float(colour @ np.array(weights)) / 255
    assert abs(float(frame.to_ndarray()[4, 4]) - luma) <= 2


def test_older_samples_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    write_clips(out, smooth(), ASKED, fps=12, seed=5)

    def fails(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(module, "contact_sheet", fails)
        for folder in (out, tmp_path / "new"):
            with pytest.raises(OSError, match="disk full"):
                write_clips(folder, smooth(1), ASKED[:1], fps=12, seed=5)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(list(out.glob("*.mp4"))) == 2
    # What a killed run left behind is cleared.
    left = tmp_path / ".out.writing"
    left.mkdir()
    (left / "sample_007.mp4").write_bytes(b"half")
    write_clips(out, smooth(1), ASKED[:1], fps=12, seed=5)
    assert [path.name for path in out.glob("*.mp4")] == ["sample_000.mp4"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # So is what it had moved away, and a folder of more than a thousand samples is one.
    older = tmp_path / ".out.older"
    older.mkdir()
    (older / "sample_007.mp4").write_bytes(b"old")
    (out / "sample_1000.mp4").write_bytes(b"old")
    write_clips(out, smooth(1), ASKED[:1], fps=12, seed=5)
    assert {path.name for path in out.iterdir()} == {"sample_000.mp4", CONTACT_SHEET, LIST}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_other_files_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter.tex").write_text("all of it")
    with pytest.raises(DataError, match="holds files that are no samples and would be lost"):
        write_clips(mine, smooth(), ASKED, fps=12, seed=5)
    assert (mine / "chapter.tex").read_text() == "all of it"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]
    samples, link = tmp_path / "samples", tmp_path / "link"
    samples.mkdir()
    link.symlink_to(samples)
    with pytest.raises(DataError, match="would be lost"):
        write_clips(link, smooth(), ASKED, fps=12, seed=5)
    assert link.is_symlink() and samples.is_dir()
    with pytest.raises(DataError, match="would be lost"):
        write_clips(mine / "chapter.tex", smooth(), ASKED, fps=12, seed=5)


def test_pixels_become_the_nearest_bytes() -> None:
    values = torch.tensor([-1.5, -1.0, -0.9945, -0.9, 0.004, 0.9922, 1.0, 1.5])
    found = as_bytes(values.view(1, 1, 1, 1, -1).expand(1, 3, 1, 1, 8))
    wanted = [0, 0, 1, 13, 128, 254, 255, 255]
    assert found.shape == (1, 1, 1, 8, 3) and found[0, 0, 0, :, 1].tolist() == wanted


FRAMES = 21
STRETCHES = (9, 1, 11)


def test_long_videos_show_the_pixels_and_keep_some_frames(tmp_path: Path) -> None:
    pixels = smooth(2, FRAMES)

    def decoder(latents: Tensor) -> Tensor:
        assert latents.dtype == torch.float32
        return latents

    writer = LongVideoWriter(tmp_path, (4, 1), decoder, num_frames=FRAMES, fps=12)
    for part in pixels.double().transpose(1, 2).split(STRETCHES, dim=1):
        writer.append(part)
    assert writer.num_frames == FRAMES
    videos = writer.finish()
    wanted = ((pixels.permute(0, 2, 3, 4, 1).numpy() + 1) * 127.5).round()
    for video, number, want in zip(videos, (4, 1), wanted, strict=True):
        frames, fps = read(tmp_path / f"sample_00{number}.mp4")
        assert frames.shape == (FRAMES, 32, 48, 3) and fps == 12
        assert np.abs(frames - want).mean() < 4
        assert (video.number, video.num_frames) == (number, FRAMES)
        # 8 frames from the first to the last.
        shown = np.linspace(0, FRAMES - 1, 8).round().astype(int)
        assert video.shown.shape == (8, 32, 48, 3) and (video.shown == want[shown]).all()


def test_what_is_written_can_be_played_before_the_end_and_must_be_finite(tmp_path: Path) -> None:
    pixels = torch.cat([smooth(1, 300)] * 2, dim=2)
    writer = LongVideoWriter(tmp_path, (0,), lambda x: x, num_frames=600, fps=12)
    writer.append(pixels.transpose(1, 2))
    frames, _ = read(tmp_path / "sample_000.mp4")
    assert 200 < len(frames) < 600
    writer.abandon()
    writer = LongVideoWriter(tmp_path, (0,), lambda x: x, num_frames=FRAMES, fps=12)
    pixels = smooth(1, 3)
    writer.append(pixels.transpose(1, 2))
    pixels[0, 1, 2, 0, 0] = torch.inf
    with pytest.raises(NotFiniteError, match="not finite, so nothing was written; look whether"):
        writer.append(pixels.transpose(1, 2))
    writer.abandon()
