"""Videos that are written while they are made, read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from megatron_ext.video.sampling.clips import CONTACT_SHEET, LIST
from megatron_ext.video.sampling.films import (
    Film,
    FilmWriter,
    LongRequest,
    NotFiniteError,
    Switch,
    describe_films,
)
from tests.video.sampling.test_clips import read, smooth

FRAMES = 21
STRETCHES = (9, 1, 11)


def as_latents(pixels: Tensor) -> Tensor:
    """``[b, 3, f, H, W]`` for a decoder that changes nothing."""
    return pixels.transpose(1, 2)


def write(folder: Path, pixels: Tensor, numbers: tuple[int, ...]) -> list[Film]:
    writer = FilmWriter(folder, numbers, lambda x: x, num_frames=FRAMES, fps=12)
    for part in pixels.split(STRETCHES, dim=2):
        writer.append(as_latents(part))
    assert writer.num_frames == FRAMES
    return writer.finish()


def test_videos_show_the_pixels_and_keep_some_frames(tmp_path: Path) -> None:
    pixels = smooth(2, FRAMES)
    films = write(tmp_path, pixels, (4, 1))
    wanted = ((pixels.permute(0, 2, 3, 4, 1).numpy() + 1) * 127.5).round()
    for film, number, want in zip(films, (4, 1), wanted, strict=True):
        frames, fps = read(tmp_path / f"sample_00{number}.mp4")
        assert frames.shape == (FRAMES, 32, 48, 3) and fps == 12
        assert np.abs(frames - want).mean() < 4
        assert (film.number, film.num_frames, film.height, film.width) == (number, FRAMES, 32, 48)
        # 8 frames from the first to the last.
        shown = np.linspace(0, FRAMES - 1, 8).round().astype(int)
        assert film.shown.shape == (8, 32, 48, 3) and (film.shown == want[shown]).all()


def test_what_is_written_can_be_played_before_the_end(tmp_path: Path) -> None:
    """A run that is killed leaves the frames that the encoder has given out."""
    pixels = torch.cat([smooth(1, 300)] * 2, dim=2)
    writer = FilmWriter(tmp_path, (0,), lambda x: x, num_frames=600, fps=12)
    writer.append(as_latents(pixels))
    frames, _ = read(tmp_path / "sample_000.mp4")
    assert 200 < len(frames) < 600
    writer.abandon()


def test_the_list_and_the_contact_sheet_follow_the_requests(tmp_path: Path) -> None:
    asked = [LongRequest("a cat", (Switch(3, "a dog"),)), LongRequest("a bird")]
    films = [*write(tmp_path, smooth(1, FRAMES), (1,)), *write(tmp_path, smooth(1, FRAMES), (0,))]
    describe_films(tmp_path, films, asked, fps=12, seed=5, facts={"iteration": 40})
    rows = [json.loads(line) for line in (tmp_path / LIST).read_text("utf-8").splitlines()]
    assert [row["path"] for row in rows] == ["sample_000.mp4", "sample_001.mp4"]
    assert rows[0]["switches"] == [{"frame": 3, "text": "a dog"}] and rows[1]["switches"] == []
    common = {"seed": 5, "num_frames": FRAMES, "height": 32, "width": 48, "fps": 12}
    assert rows[1].items() >= {"text": "a bird", "number": 1, "iteration": 40, **common}.items()
    with Image.open(tmp_path / CONTACT_SHEET) as sheet:
        assert sheet.size == (4 + 8 * (48 + 4), 2 * (20 + 32 + 4))


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    writer = FilmWriter(tmp_path, (0,), lambda x: x, num_frames=FRAMES, fps=12)
    pixels = smooth(1, 3)
    writer.append(as_latents(pixels))
    pixels[0, 1, 2, 0, 0] = torch.inf
    with pytest.raises(NotFiniteError, match="not finite, so nothing was written; look whether"):
        writer.append(as_latents(pixels))
    writer.abandon()
