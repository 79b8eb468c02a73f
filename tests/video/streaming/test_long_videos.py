"""Videos that are written while they are made, read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_ext.video.streaming.video_files import (
    LongVideoWriter,
    NotFiniteError,
    WrittenVideo,
)
from tests.video.sampling.test_clips import read, smooth

FRAMES = 21
STRETCHES = (9, 1, 11)


def as_latents(pixels: Tensor) -> Tensor:
    """Return pixels as latents ``[b, f, 3, H, W]`` for a decoder that changes nothing."""
    return pixels.transpose(1, 2)


def write(folder: Path, pixels: Tensor, numbers: tuple[int, ...]) -> list[WrittenVideo]:
    writer = LongVideoWriter(folder, numbers, lambda x: x, num_frames=FRAMES, fps=12)
    for part in pixels.split(STRETCHES, dim=2):
        writer.append(as_latents(part))
    assert writer.num_frames == FRAMES
    return writer.finish()


def test_videos_show_the_pixels_and_keep_some_frames(tmp_path: Path) -> None:
    pixels = smooth(2, FRAMES)
    videos = write(tmp_path, pixels, (4, 1))
    wanted = ((pixels.permute(0, 2, 3, 4, 1).numpy() + 1) * 127.5).round()
    for video, number, want in zip(videos, (4, 1), wanted, strict=True):
        frames, fps = read(tmp_path / f"sample_00{number}.mp4")
        assert frames.shape == (FRAMES, 32, 48, 3) and fps == 12
        assert np.abs(frames - want).mean() < 4
        assert (video.number, video.num_frames) == (number, FRAMES)
        # 8 frames from the first to the last.
        shown = np.linspace(0, FRAMES - 1, 8).round().astype(int)
        assert video.shown.shape == (8, 32, 48, 3) and (video.shown == want[shown]).all()


def test_what_is_written_can_be_played_before_the_end(tmp_path: Path) -> None:
    """Read a file that is not finished, as a killed run leaves it."""
    pixels = torch.cat([smooth(1, 300)] * 2, dim=2)
    writer = LongVideoWriter(tmp_path, (0,), lambda x: x, num_frames=600, fps=12)
    writer.append(as_latents(pixels))
    frames, _ = read(tmp_path / "sample_000.mp4")
    assert 200 < len(frames) < 600
    writer.abandon()


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    writer = LongVideoWriter(tmp_path, (0,), lambda x: x, num_frames=FRAMES, fps=12)
    pixels = smooth(1, 3)
    writer.append(as_latents(pixels))
    pixels[0, 1, 2, 0, 0] = torch.inf
    with pytest.raises(NotFiniteError, match="not finite, so nothing was written; look whether"):
        writer.append(as_latents(pixels))
    writer.abandon()
