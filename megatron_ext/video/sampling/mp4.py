"""Writes frames as an H.264 file in mp4, in colours that all players show alike."""

from __future__ import annotations

import importlib
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.errors import ConfigError

_CONSTANT_QUALITY = {"crf": "17"}
"""Options of x264 for a quality that looks lossless."""
_FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "flush_packets": "1"}
"""Options of the mp4 format that make a file playable while it is written (fragments)."""
_FRAGMENT = 2  # seconds
_HD = (1280, 720)
"""(Width, height); a video that reaches either is written in BT.709, smaller ones in BT.601.

Players assume the same colour spaces for a video that does not state its own."""
_BT709, _BT601, _LIMITED = 1, 6, 1
"""Codes of the colour matrices BT.709 and BT.601 (ITU-T H.273), and FFmpeg's code for the
brightness range 16 to 235."""


class Mp4Writer:
    """An H.264 file of one clip, written frame by frame.

    With ``growing`` the file can be played while it is written; otherwise only after `close`. The
    format needs even sizes, so an odd height or width is padded. The file states its colour space,
    so that all players show the same colours: the matrix of BT.709 for HD and of BT.601 for
    smaller video, and always the primaries and the transfer function of BT.709.

    Raises:
        ConfigError: PyAV is not installed.
    """

    def __init__(self, path: Path, fps: float, *, growing: bool = False) -> None:
        (self._av,) = imported("av", "av")
        # Without "file:" FFmpeg would take the text before a colon for the name of a protocol.
        name = f"file:{path}"
        self._container = self._av.open(name, "w", options=_FRAGMENTED if growing else {})
        options = _CONSTANT_QUALITY | (
            {"g": str(max(1, round(_FRAGMENT * fps)))} if growing else {}
        )
        rate = Fraction(fps).limit_denominator(1001)
        self._stream = self._container.add_stream("libx264", rate=rate, options=options)
        self._stream.pix_fmt = "yuv420p"
        self._is_begun = False

    def append(self, frames: NDArray[np.uint8]) -> None:
        """Write RGB frames ``[f, H, W, 3]``; all calls must pass frames of the same size."""
        _, height, width, _ = frames.shape
        even = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if not self._is_begun:
            self._begin(*even.shape[1:3])
        for frame in even:
            picture = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            encoded = picture.reformat(
                format="yuv420p", dst_colorspace=self._matrix, dst_color_range=_LIMITED
            )
            self._container.mux(self._stream.encode(encoded))

    def _begin(self, height: int, width: int) -> None:
        self._stream.height = height
        self._stream.width = width
        self._matrix = _BT709 if width >= _HD[0] or height >= _HD[1] else _BT601
        context = self._stream.codec_context
        context.colorspace = self._matrix
        context.color_range = _LIMITED
        context.color_primaries = context.color_trc = _BT709
        self._is_begun = True

    def close(self) -> None:
        """Write the frames that the encoder still holds back, and finish the file."""
        try:
            if self._is_begun:
                self._container.mux(self._stream.encode())
        finally:
            self._container.close()

    def abandon(self) -> None:
        """Close the file without finishing it, after an error; no further error is raised."""
        # Hide errors here, which only follow from the error that ended the writing.
        with suppress(Exception):
            self._container.close()


def as_bytes(pixels: Tensor) -> NDArray[np.uint8]:
    """Return P clips' pixels ``[P, 3, f, H, W]`` as bytes ``[P, f, H, W, 3]``.

    Values are clamped to [-1, 1], which becomes 0 to 255.
    """
    scaled = ((pixels.detach().float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    frames: NDArray[np.uint8] = scaled.cpu().permute(0, 2, 3, 4, 1).contiguous().numpy()
    return frames


def imported(package: str, *modules: str) -> list[Any]:
    """Import ``modules`` and return them.

    ConfigError is raised if ``package``, the pip package that contains them, is not installed.
    """
    try:
        return [importlib.import_module(name) for name in modules]
    except ImportError:
        raise ConfigError(
            f"Writing clips needs the package {package}, which is not installed; run "
            "`pip install 'megatron-ext[video]'`."
        ) from None
