"""Files of long videos, which grow while the videos are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.video.sampling.clips import Mp4Writer, as_bytes, clip_name, shown_frames

Decoder = Callable[[Tensor], Tensor]
"""Takes the next latents ``[b, c, t, h, w]`` of b videos, gives their pixels ``[b, 3, f, H, W]``;
see `video.data.codecs`."""


class NotFiniteError(DataError):
    """A video holds values that are not finite."""


@dataclass(frozen=True)
class WrittenVideo:
    """A video that was written.

    Attributes:
        number: number of its prompt.
        num_frames: number of its frames, in pixels.
        shown: some of its frames, from the first to the last, ``[k, H, W, 3]``.
    """

    number: int
    num_frames: int
    shown: NDArray[np.uint8]


class LongVideoWriter:
    """Writes a batch of videos, a stretch of frames at a time; `finish` or `abandon` it.

    Args:
        folder: exists.
        numbers: numbers of the prompts, which name the files.
        decoder: decodes the latents, from the beginning of the videos on.
        num_frames: frames of each whole video, in pixels.
        fps: frames per second.

    Attributes:
        num_frames: frames of each video that were written so far, in pixels.

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
        self._shown = set(shown_frames(num_frames).tolist())
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
        """Close files that are not to be finished."""
        for file in self._files:
            file.abandon()

    def finish(self) -> list[WrittenVideo]:
        """Close the files and return the videos."""
        for file in self._files:
            file.close()
        stills = np.stack(self._stills, axis=1)
        return [
            WrittenVideo(number, self.num_frames, shown)
            for number, shown in zip(self._numbers, stills, strict=True)
        ]
