"""H.264 files that are written frame by frame."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.errors import ConfigError

_CONSTANT_QUALITY = {"crf": "17"}
"""Of x264, where differences can hardly be seen."""
_FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "flush_packets": "1"}
"""What was written can be played before the file is whole, and its index is not kept in memory."""
_FRAGMENT = 2  # seconds


class Mp4Writer:
    """One clip; an odd height or width gains a row or column, which the format needs.

    Args:
        path: of the file.
        fps: frames per second.
        growing: the file can be played while it grows.

    Raises:
        ConfigError: PyAV is not installed.
    """

    def __init__(self, path: Path, fps: int, *, growing: bool = False) -> None:
        self._av = _av()
        self._container = self._av.open(str(path), "w", options=_FRAGMENTED if growing else {})
        options = _CONSTANT_QUALITY | ({"g": str(_FRAGMENT * fps)} if growing else {})
        self._stream = self._container.add_stream("libx264", rate=fps, options=options)
        self._stream.pix_fmt = "yuv420p"
        self._is_begun = False

    def append(self, frames: NDArray[np.uint8]) -> None:
        """Write frames ``[f, H, W, 3]``, all of one size."""
        _, height, width, _ = frames.shape
        even = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if not self._is_begun:
            self._stream.height, self._stream.width = even.shape[1:3]
            self._is_begun = True
        for frame in even:
            picture = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            self._container.mux(self._stream.encode(picture))

    def close(self) -> None:
        """Write what the encoder still holds, and the end of the file."""
        try:
            if self._is_begun:
                self._container.mux(self._stream.encode())
        finally:
            self._container.close()

    def abandon(self) -> None:
        """Let go of a file that is not to be finished."""
        # Whatever goes wrong here follows from the error that ended the writing.
        with suppress(Exception):
            self._container.close()


def as_bytes(pixels: Tensor) -> NDArray[np.uint8]:
    """``[P, 3, f, H, W]`` in [-1, 1], beyond it cut off, to ``[P, f, H, W, 3]``."""
    scaled = ((pixels.detach().float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    frames: NDArray[np.uint8] = scaled.cpu().permute(0, 2, 3, 4, 1).contiguous().numpy()
    return frames


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise missing("av") from None
    return av


def missing(package: str) -> ConfigError:
    """The error about a package of the extra ``video``."""
    return ConfigError(
        f"Writing clips needs the package {package}, which is not installed; run "
        "`pip install 'megatron-ext[video]'`."
    )
