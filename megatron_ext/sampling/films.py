"""Long videos as files, written while they are made, so that memory does not grow with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.sampling.clips import (
    CONTACT_SHEET,
    LIST,
    SHEET_FRAMES,
    clip_name,
    contact_sheet,
)
from megatron_ext.sampling.long_requests import LongRequest
from megatron_ext.sampling.mp4 import Mp4Writer, as_bytes

Decoder = Callable[[Tensor], Tensor]
"""Takes the next latents ``[b, c, t, h, w]`` of b videos, gives their pixels ``[b, 3, f, H, W]``;
see `data.video.block_decoder`."""


class NotFiniteError(DataError):
    """A video holds values that are not finite."""


@dataclass(frozen=True)
class Film:
    """A video that was written.

    Attributes:
        number: of its request.
        num_frames, height, width: in pixels.
        shown: some of its frames, from the first to the last, ``[k, H, W, 3]``.
    """

    number: int
    num_frames: int
    height: int
    width: int
    shown: NDArray[np.uint8]


class FilmWriter:
    """Writes a batch of videos, a stretch of frames at a time; `finish` or `abandon` it.

    Args:
        folder: exists.
        numbers: of the requests; they name the files.
        decoder: of their latents, at their beginning.
        num_frames: of each whole video, in pixels.
        fps: frames per second.

    Attributes:
        num_frames: of each video, in pixels, so far.

    Raises:
        ConfigError: PyAV is not installed.
    """

    def __init__(
        self,
        folder: Path,
        numbers: Sequence[int],
        decoder: Decoder,
        *,
        num_frames: int,
        fps: int,
    ) -> None:
        self._numbers, self._decoder = numbers, decoder
        shown = np.linspace(0, num_frames - 1, min(num_frames, SHEET_FRAMES)).round().astype(int)
        self._shown = {int(frame) for frame in shown}
        self._stills: list[NDArray[np.uint8]] = []
        self._files = [Mp4Writer(folder / clip_name(n), fps, growing=True) for n in numbers]
        self.num_frames = 0

    def append(self, latents: Tensor) -> None:
        """Decode and write the next latents ``[b, t, c, h, w]``.

        Raises:
            NotFiniteError: a value is not finite.
        """
        pixels = self._decoder(latents.float().transpose(1, 2))
        if not bool(pixels.isfinite().all()):
            raise NotFiniteError(
                "Sampled videos hold values that are not finite, so nothing was written; look "
                "whether the training diverged."
            )
        frames = as_bytes(pixels)
        for file, clip in zip(self._files, frames, strict=True):
            file.append(clip)
        for i in range(frames.shape[1]):
            if self.num_frames + i in self._shown:
                self._stills.append(frames[:, i].copy())
        self.num_frames += frames.shape[1]

    def abandon(self) -> None:
        """Let go of files that are not to be finished."""
        for file in self._files:
            file.abandon()

    def finish(self) -> list[Film]:
        """Close the files; gives the videos."""
        for file in self._files:
            file.close()
        stills = np.stack(self._stills, axis=1)
        _, _, height, width, _ = stills.shape
        return [
            Film(number, self.num_frames, height, width, shown)
            for number, shown in zip(self._numbers, stills, strict=True)
        ]


def describe_films(
    folder: Path,
    films: Sequence[Film],
    requests: Sequence[LongRequest],
    *,
    fps: int,
    seed: int,
    facts: Mapping[str, Any],
) -> None:
    """Write `CONTACT_SHEET` and `LIST` beside the videos.

    Args:
        folder: of the videos.
        films: one for each request.
        requests: in the order of their numbers.
        fps: frames per second.
        seed: of the noise.
        facts: more to be noted of each video.

    Raises:
        ConfigError: pillow is not installed.
    """
    ordered = sorted(films, key=lambda film: film.number)
    rows = [
        {
            "path": clip_name(film.number),
            **asdict(request),
            "seed": seed,
            "number": film.number,
            **{name: getattr(film, name) for name in ("num_frames", "height", "width")},
            "fps": fps,
            **facts,
        }
        for film, request in zip(ordered, requests, strict=True)
    ]
    titles = [request.title for request in requests]
    contact_sheet(titles, np.stack([film.shown for film in ordered]), folder / CONTACT_SHEET)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / LIST).write_text(lines, "utf-8")
