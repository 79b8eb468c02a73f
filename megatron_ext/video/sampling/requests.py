"""Requests for clips: captions, and references that are read and encoded for them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.run import MODES, ConditionConfig
from megatron_ext.video.data.clips import Clip, decode, probe, with_suffix
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.conditions import Text, frame_masks, place_references, sections
from megatron_ext.video.data.geometry import subsampling
from megatron_ext.video.data.text_encoders import TextEncoder
from megatron_ext.video.sampling.flow import References

Request = TypeVar("Request")


@dataclass(frozen=True)
class SampleShape:
    """Pixels of the clips that are sampled; one frame makes an image.

    The caption tells the model the frames per second.
    """

    num_frames: int
    height: int
    width: int
    fps: int = 24


@dataclass(frozen=True)
class ClipRequest:
    """A request for one clip.

    Attributes:
        text: caption without suffix.
        reference: image, video or folder of images whose first frames (head modes), last frames
            (tail modes) or both (i2v_loop) are given to the model.
        mode: one of `conditions.MODES`; t2v without reference, and only then.
        motion: motion score in the caption; None leaves it out.

    Raises:
        ConfigError: an unknown mode, or a mode and a reference that do not go together.
    """

    text: str
    reference: str | None = None
    mode: str = "t2v"
    motion: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(
                f"The mode ({self.mode}) of the prompt {self.text!r} must be one of "
                f"{', '.join(MODES)}; correct its name."
            )
        if (self.mode == "t2v") != (self.reference is None):
            raise ConfigError(
                f"The prompt {self.text!r} has the mode {self.mode} and the reference "
                f"{self.reference}, but t2v takes no reference and all other modes need one; "
                "correct either."
            )

    @property
    def title(self) -> str:
        """Return the caption."""
        return self.text


@dataclass(frozen=True)
class EncodedRequests:
    """Requests as the sampler takes them, on the CPU.

    Attributes:
        latent_shape: shape of one clip, (c, t, h, w).
        text: captions, ``[P, l, d]`` and ``[P, e]``.
        null: the empty caption, ``[1, k, d]`` and ``[1, e]``.
        references: ``[P, c, t, h, w]`` and ``[P, t]``; None if no request has one.
    """

    latent_shape: tuple[int, int, int, int]
    text: Text
    null: Text
    references: References | None

    def __len__(self) -> int:
        return len(self.text.sequence)


def read_requests(path: str | os.PathLike[str]) -> list[ClipRequest]:
    """Read a file of prompts; see `read_prompts`.

    Rows of a jsonl have ``text``, and may have ``reference`` (relative to the file), ``mode``
    (i2v_head with a reference unless it says otherwise) and ``motion``.
    """
    return read_prompts(path, ClipRequest, _request)


def read_prompts(
    path: str | os.PathLike[str],
    kind: Callable[[str], Request],
    of_row: Callable[[dict[str, Any], Path], Request],
) -> list[Request]:
    """Read a text file with a caption in each line, or a jsonl; empty lines are left out.

    Args:
        kind: the dataclass of requests, made from a caption alone.
        of_row: makes a request from a row with ``text`` and perhaps other fields of ``kind``, and
            the file; may raise ConfigError, ValueError or TypeError.

    Raises:
        DataError: no such file, a row that cannot be read, or no row at all.
    """
    source = Path(path)
    lines = read_lines(source, f"The file of prompts {source}")
    if source.suffix != ".jsonl":
        return [kind(line) for _, line in lines]
    known, found = [field.name for field in fields(kind)], []  # type: ignore[arg-type]
    for number, line in lines:
        row = read_row(line, source, number, known, texts=("reference", "mode"))
        try:
            found.append(of_row(row, source))
        except (ConfigError, ValueError, TypeError) as error:
            raise bad_row(source, number, f"is refused ({error})") from None
    return found


def read_lines(source: Path, what: str) -> list[tuple[int, str]]:
    """Return the lines of a file that are not blank, with their numbers, counted from 1.

    Raises:
        DataError: the file, named by ``what``, cannot be read, or has no such lines.
    """
    try:
        lines = source.read_text("utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{what} cannot be read ({error}); give a text file with one prompt a line, or a jsonl."
        ) from None
    found = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"{what} holds no prompt; write one a line.")
    return found


def read_row(
    line: str, source: Path, number: int, known: Sequence[str], texts: Sequence[str]
) -> dict[str, Any]:
    """Return a row of a jsonl of prompts, or raise DataError.

    It must have ``text``, and may have the ``known`` names; values of ``texts`` must be texts.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise bad_row(source, number, f"is no JSON ({error})") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise bad_row(source, number, "has no `text`")
    if unknown := sorted(row.keys() - set(known)):
        raise bad_row(source, number, f"has {unknown}, but may have {list(known)}")
    for name in texts:
        if not isinstance(row.get(name), str | None):
            raise bad_row(source, number, f"has `{name}` {row[name]!r}, which is no text")
    return row


def bad_row(source: Path, line: int, what: str) -> DataError:
    """Return the error about a row of a jsonl that is of no use."""
    return DataError(f"{source} line {line} {what}; mend the row or take it out.")


def _request(row: dict[str, Any], source: Path) -> ClipRequest:
    reference, motion = row.get("reference") or None, row.get("motion")
    if motion is not None and not math.isfinite(motion := float(motion)):
        raise ValueError(f"`motion` {row['motion']!r} is no finite number")
    return ClipRequest(
        text=row["text"].strip(),
        reference=None if reference is None else str(source.parent / reference),
        mode=row.get("mode") or ("t2v" if reference is None else "i2v_head"),
        motion=motion,
    )


def encode_requests(
    requests: Sequence[ClipRequest],
    shape: SampleShape,
    codec: VideoCodec,
    text_encoder: TextEncoder,
    *,
    null: Text | None = None,
    conditions: ConditionConfig | None = None,
) -> EncodedRequests:
    """Encode captions with the suffix of training, and references at the size of the clips.

    Args:
        codec, text_encoder: encoders of the training data.
        null: the empty caption of training; None encodes it.
        conditions: conditions of training, which give the lengths of v2v references.

    Raises:
        ConfigError: a shape that the codec does not take.
        DataError: a reference that cannot be read, or references or clips too short for a mode.
    """
    latent_shape = codec.latent_shape(shape.num_frames, shape.height, shape.width)
    moving = shape.num_frames > 1
    fps = shape.fps if moving else None
    captions = [with_suffix(r.text, fps, r.motion if moving else None) for r in requests]
    null = null or _encoded(text_encoder, [""])
    references = None
    if any(request.reference is not None for request in requests):
        conditions = conditions or ConditionConfig()
        modes = torch.tensor([MODES.index(request.mode) for request in requests])
        placed = [_placed(r, shape, latent_shape, codec, conditions) for r in requests]
        masks = frame_masks(modes, latent_shape[1], conditions)
        references = References(torch.stack(placed), masks)
    null = Text(null.sequence.cpu(), null.pooled.cpu())
    return EncodedRequests(latent_shape, _encoded(text_encoder, captions), null, references)


def _encoded(encoder: TextEncoder, captions: Sequence[str]) -> Text:
    """Encode captions one by one, for the memory of large encoders."""
    pairs = [encoder.encode([caption]) for caption in captions]
    return Text(*(torch.cat(parts).cpu() for parts in zip(*pairs, strict=True)))


def _placed(
    request: ClipRequest,
    shape: SampleShape,
    latent_shape: tuple[int, int, int, int],
    codec: VideoCodec,
    conditions: ConditionConfig,
) -> Tensor:
    """Return the latents of a request's references at their places, ``[c, t, h, w]``."""
    placed = []
    for section in sections(request.mode, latent_shape[1], conditions):
        assert request.reference is not None
        clip = Clip(request.reference, request.text)
        found = probe(clip)
        # Frames are taken near the frame rate of the clips.
        interval = subsampling(found.fps, shape.fps)[0]
        count = (section.length - 1) * codec.temporal + 1
        needed = interval * (count - 1) + 1
        if found.num_frames < needed:
            raise DataError(
                f"The reference {request.reference} has {found.num_frames} frame(s) of "
                f"{found.fps:g} per second, but the mode {request.mode} needs {needed}; give a "
                "longer one, or take an i2v mode."
            )
        first = found.num_frames - needed if section.start else 0
        pixels = decode(clip, first, interval, count, (shape.height, shape.width))
        # Each section is encoded by itself, as in training.
        placed.append((section, codec.encode(pixels[None])[0].cpu()))
    return place_references(placed, latent_shape, torch.float32)
