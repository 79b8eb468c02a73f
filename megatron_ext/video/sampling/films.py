"""Long videos as files, written while they are made, so that memory does not grow with them.

What long videos are asked for: captions, and where they give way to others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.sampling.clips import (
    CONTACT_SHEET,
    LIST,
    SHEET_FRAMES,
    Mp4Writer,
    as_bytes,
    clip_name,
    contact_sheet,
)
from megatron_ext.video.sampling.requests import read_prompts


@dataclass(frozen=True)
class Switch:
    """Another caption from a frame on.

    Attributes:
        frame: first latent frame that is made under it.
        text: caption.
    """

    frame: int
    text: str


@dataclass(frozen=True)
class LongRequest:
    """One long video that is asked for.

    Attributes:
        text: caption at the beginning.
        switches: in the order of their frames.

    Raises:
        ConfigError: a switch at frame 0 or before, or out of order.
    """

    text: str
    switches: tuple[Switch, ...] = ()

    def __post_init__(self) -> None:
        frames = [0, *self.frames]
        if any(a >= b for a, b in zip(frames, frames[1:], strict=False)):
            raise ConfigError(
                f"The switches of the prompt {self.text!r} are at frames "
                f"{', '.join(map(str, self.frames))}, but must be above 0 and rising; sort them."
            )

    @property
    def frames(self) -> tuple[int, ...]:
        """Of the switches."""
        return tuple(switch.frame for switch in self.switches)

    @property
    def title(self) -> str:
        """All captions in a line."""
        return " > ".join([self.text, *(switch.text for switch in self.switches)])


def read_long_requests(path: str | os.PathLike[str]) -> list[LongRequest]:
    """Read a text file with a caption in each line, or a jsonl.

    Rows of a jsonl have ``text``, and may have ``switches``, a list of ``{"frame": latent frame,
    "text": caption}``. Empty lines are left out.

    Raises:
        DataError: no such file, a row that cannot be read, or no row at all.
    """
    return read_prompts(path, lambda text, _: LongRequest(text), _request, LongRequest)


def _request(row: dict[str, Any], source: Path) -> LongRequest:
    switches = row.get("switches") or []
    if not isinstance(switches, list):
        raise TypeError(f"`switches` {switches!r} is no list")
    return LongRequest(row["text"].strip(), tuple(_switch(entry) for entry in switches))


def _switch(entry: Any) -> Switch:
    if not isinstance(entry, dict) or entry.keys() != {"frame", "text"}:
        raise ValueError(f"a switch must have `frame` and `text`, but is {entry!r}")
    frame, text = entry["frame"], entry["text"]
    if type(frame) is not int or not isinstance(text, str):
        raise TypeError(f"a switch needs an integer and a text, but is {entry!r}")
    return Switch(frame, text.strip())


def at_block_starts(
    requests: Sequence[LongRequest], *, block: int, num_frames: int
) -> list[LongRequest]:
    """Requests whose switches lie where they take effect, at the next start of a block.

    Args:
        requests: see `LongRequest`.
        block: latent frames that are made under one prompt.
        num_frames: latent frames of the videos.

    Raises:
        DataError: a switch beyond the last block, or two in one block.
    """
    moved = []
    for request in requests:
        starts = [-(-frame // block) * block for frame in request.frames]
        last = num_frames - block
        if starts and max(starts) > last:
            raise DataError(
                f"The prompt {request.text!r} switches at latent frame {max(request.frames)}, but "
                f"the last frame block begins at {last}; switch earlier, or sample longer videos "
                "with `--sample-latent-frames`."
            )
        if len({*starts}) < len(starts):
            raise DataError(
                f"The prompt {request.text!r} switches at frames "
                f"{', '.join(map(str, request.frames))}, two of them in one block of {block} "
                "frames, which is made under one prompt; move them apart."
            )
        switches = tuple(
            replace(switch, frame=start)
            for switch, start in zip(request.switches, starts, strict=True)
        )
        moved.append(replace(request, switches=switches))
    return moved


Decoder = Callable[[Tensor], Tensor]
"""Takes the next latents ``[b, c, t, h, w]`` of b videos, gives their pixels ``[b, 3, f, H, W]``;
see `video.data.codecs`."""


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
