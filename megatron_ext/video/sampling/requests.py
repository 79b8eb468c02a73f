"""Reads requests for clips and encodes their captions and references.

A request asks for one clip. It has a caption, and perhaps a reference: an image or video file that
provides some of the clip's frames.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_ext.disk.reading import UnreadableFile, parse_json, read_text
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import EncodeConfig
from megatron_ext.video.config.run import MODES, ConditionConfig, SampleConfig
from megatron_ext.video.data.clips import Clip
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.conditions import (
    Section,
    Text,
    frame_masks,
    null_like,
    place_references,
    sections,
)
from megatron_ext.video.data.encode import caption_for
from megatron_ext.video.data.frames import decode, probe
from megatron_ext.video.data.geometry import ClipShape, subsampling
from megatron_ext.video.data.text_encoders import TextEncoder
from megatron_ext.video.sampling.flow import References

Request = TypeVar("Request")


@dataclass(frozen=True)
class SampleShape:
    """The size of sampled clips in frames and pixels; a clip of one frame is an image.

    Attributes:
        fps: frames per second; captions of videos state it if ``encode.fps_words`` is set.
        encode: flags with which the training data was encoded; references and captions are encoded
            in the same way.
    """

    num_frames: int
    height: int
    width: int
    fps: float = 24
    encode: EncodeConfig = field(default_factory=EncodeConfig)


@dataclass(frozen=True)
class ClipRequest:
    """A request for one clip.

    Attributes:
        text: caption; words on frame rate and motion are added to it only when it is encoded.
        reference: image, video or folder of images; its first frames, last frames or both become
            those of the clip, as ``mode`` says. None for mode t2v.
        mode: condition mode, one of `config.run.MODES`: which frames of the clip the reference
            gives: none (t2v), the first ("head"), the last ("tail") or both (i2v_loop).
        motion: motion score to add to the caption; None adds none.
        negative_prompt: caption from which guidance leads away; None: ``--sample-negative-prompt``.
        seed: seed of the noise, which alone determines it. None: ``--sample-seed`` and the
            request's position among all requests determine it.
        steps: number of steps of Euler's method; None: ``--sample-steps``.
        size: height and width in pixels; None: the size that the flags set.

    Raises:
        ConfigError: the mode is unknown, or the reference does not fit it.
    """

    text: str
    reference: str | None = None
    mode: str = "t2v"
    motion: float | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    steps: int | None = None
    size: tuple[int, int] | None = None

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
        """Return the caption, the clip's title in a contact sheet."""
        return self.text


@dataclass(frozen=True)
class EncodedRequests:
    """P encoded requests, the input of the sampler, on the CPU.

    Attributes:
        latent_shape: shape of one clip, (c, t, h, w).
        text: encoded captions: tokens ``[P, l, d]`` and pooled vectors ``[P, e]``.
        null: the encoded empty caption, ``[1, k, d]`` and ``[1, e]``, or the encoded negative
            prompts, ``[P, l, d]`` and ``[P, e]``.
        references: latents ``[P, c, t, h, w]`` and masks ``[P, t]``; None if no request has one.
    """

    latent_shape: tuple[int, int, int, int]
    text: Text
    null: Text
    references: References | None

    def __len__(self) -> int:
        return len(self.text.sequence)


def read_requests(path: str | os.PathLike[str]) -> list[ClipRequest]:
    """Read requests for clips from a text file with one caption per line, or from a jsonl.

    A row of a jsonl has the field ``text``, and may have other fields of `ClipRequest`. A
    reference is given by one of the fields ``image``, ``video`` and ``reference``, as a path
    relative to the jsonl. `default_mode` replaces a missing ``mode``. DataError is raised for an
    invalid file or row.
    """
    names = [*(x.name for x in fields(ClipRequest)), "image", "video"]
    texts = ("reference", "image", "video", "mode", "negative_prompt")
    return read_prompts(path, ClipRequest, _request, names=names, texts=texts)


def read_prompts(
    path: str | os.PathLike[str],
    kind: Callable[[str], Request],
    of_row: Callable[[dict[str, Any], Path], Request],
    *,
    names: Sequence[str],
    texts: Sequence[str] = (),
) -> list[Request]:
    """Read requests from a ``.jsonl``, or from a text file with one caption per line.

    Args:
        kind: the dataclass of requests, which can be built from a caption alone.
        of_row: makes a request from a row of a jsonl and the path of the file; may raise
            ConfigError, ValueError or TypeError.
        names: the names of the fields that a row may have, including ``text``.
        texts: the names of the fields whose values must be texts or null.

    Raises:
        DataError: the file cannot be read, has an invalid row, or has no row.
    """
    source = Path(path)
    lines = read_lines(source, f"The file of prompts {source}")
    if source.suffix != ".jsonl":
        return [kind(line) for _, line in lines]
    requests = []
    for number, line in lines:
        row = read_row(line, source, number, names, texts=texts)
        try:
            requests.append(of_row(row, source))
        except (ConfigError, ValueError, TypeError) as error:
            raise bad_row(source, number, f"is refused ({error})") from None
    return requests


def read_lines(source: Path, what: str) -> list[tuple[int, str]]:
    """Return (line number from 1, stripped text) of all lines of a file that are not blank.

    Raises:
        DataError: the file cannot be read, or has only blank lines. ``what`` names the file in
            the message.
    """
    try:
        lines = read_text(source).split("\n")
    except UnreadableFile as error:
        raise DataError(
            f"{what} cannot be read ({error.reason}); give a text file with one prompt a line, or "
            "a jsonl."
        ) from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"{what} holds no prompt; write one a line.")
    return numbered


def read_row(
    line: str, source: Path, number: int, names: Sequence[str], texts: Sequence[str]
) -> dict[str, Any]:
    """Parse and return ``line``, which is line ``number`` of the jsonl of prompts ``source``.

    A row must have ``text`` and may have only fields of ``names``. Values of the fields ``texts``
    must be strings or null. An invalid row raises DataError.
    """
    try:
        row = parse_json(line, source, not_finite=True)
    except UnreadableFile as error:
        raise bad_row(source, number, f"is no JSON ({error.reason})") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise bad_row(source, number, "has no `text`")
    if unknown := sorted(row.keys() - set(names)):
        raise bad_row(source, number, f"has {unknown}, but may have {list(names)}")
    for name in texts:
        if not isinstance(row.get(name), str | None):
            raise bad_row(source, number, f"has `{name}` {row[name]!r}, which is no text")
    return row


def bad_row(source: Path, line: int, what: str) -> DataError:
    """Return the error for an invalid row; ``what`` says what is wrong, as in "has no `text`"."""
    return DataError(f"{source} line {line} {what}; mend the row or take it out.")


def _request(row: dict[str, Any], source: Path) -> ClipRequest:
    motion = row.get("motion")
    if motion is not None and not math.isfinite(motion := float(motion)):
        raise ValueError(f"`motion` {row['motion']!r} is no finite number")
    name = start_of(row, ("reference", "image", "video"))
    return ClipRequest(
        text=row["text"].strip(),
        reference=None if name is None else str(source.parent / row[name]),
        mode=row.get("mode") or default_mode(name),
        motion=motion,
        negative_prompt=row.get("negative_prompt"),
        seed=whole_number(row, "seed", at_least=0),
        steps=whole_number(row, "steps", at_least=1),
        size=_size(row),
    )


def given_starts(sample: SampleConfig) -> tuple[str | None, list[str | None]]:
    """Return ("video" or "image", reference path for each of ``--sample-texts``).

    The references are those of ``--sample-video`` or ``--sample-image``. A single path serves all
    texts. Without either flag, the result is None and a path None for each text.
    """
    count = len(sample.sample_texts or [])
    name = "video" if sample.sample_video else "image" if sample.sample_image else None
    given = sample.sample_video or sample.sample_image
    paths: list[str | None] = [None] if given is None else [*given]
    return name, paths * count if len(paths) == 1 else paths


def default_mode(name: str | None) -> str:
    """Return the condition mode of a request that gives none.

    ``name`` is the field with its reference: "video" means v2v_head; "image" and "reference" mean
    i2v_head; None, for no reference, means t2v.
    """
    if name is None:
        return "t2v"
    return "v2v_head" if name == "video" else "i2v_head"


def start_of(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return which of the fields ``names`` has a value in ``row``; None if none has.

    ValueError is raised if several of them have a value.
    """
    given = [name for name in names if row.get(name)]
    if len(given) > 1:
        raise ValueError(f"it has `{given[0]}` and `{given[1]}`, which exclude each other")
    return given[0] if given else None


def whole_number(row: Mapping[str, Any], name: str, *, at_least: int) -> int | None:
    """Return the whole number under ``name`` in a row; None if it is missing or null.

    ValueError is raised for any other value, and for a number below ``at_least``.
    """
    value = row.get(name)
    if value is None:
        return None
    if type(value) is not int or value < at_least:
        raise ValueError(f"`{name}` {value!r} must be a whole number of at least {at_least}")
    return value


def _size(row: Mapping[str, Any]) -> tuple[int, int] | None:
    size = row.get("size")
    if size is None:
        return None
    if not isinstance(size, list) or [type(x) for x in size] != [int, int] or min(size) < 1:
        raise ValueError(f"`size` {size!r} must be [height, width] in pixels")
    return size[0], size[1]


def encode_requests(
    requests: Sequence[ClipRequest],
    shape: SampleShape,
    codec: VideoCodec,
    text_encoder: TextEncoder,
    *,
    null: Text | None = None,
    conditions: ConditionConfig | None = None,
) -> EncodedRequests:
    """Encode the requests' captions and references as the training data was encoded.

    Captions get words on the clip's frame rate and motion, like captions of the training data.
    References are resized to ``shape``, the frames and pixels of the clips.

    Args:
        codec, text_encoder: the encoders of the training data.
        null: the encoded empty caption of the training data; None encodes it here. A request's
            negative prompt replaces it for that request.
        conditions: flags of the training run, which set the number of frames that a v2v reference
            gives; None takes the defaults of the flags.

    Raises:
        ConfigError: the codec cannot encode the shape.
        DataError: a reference cannot be read, or a reference or the clips have fewer frames than
            the condition mode of a request needs (`ClipRequest.mode`).
    """
    latent_shape = codec.latent_shape(shape.num_frames, shape.height, shape.width)
    moving = shape.num_frames > 1
    fps = shape.fps if moving and shape.encode.fps_words else None
    captions = [
        caption_for(r.text, fps, r.motion if moving else None, text_encoder) for r in requests
    ]
    encoded = _encoded(text_encoder, captions)
    null = null or _encoded(text_encoder, [""])
    null = Text(null.sequence.cpu(), null.pooled.cpu())
    negatives = [request.negative_prompt for request in requests]
    if any(negatives):
        empty = null_like(null, encoded)
        null = Text(empty.sequence.clone(), empty.pooled.clone())
        for number, negative in enumerate(negatives):
            if negative:
                instead = _encoded(text_encoder, [negative])
                null.sequence[number] = instead.sequence[0]
                null.pooled[number] = instead.pooled[0]
    references = None
    if any(request.reference is not None for request in requests):
        conditions = conditions or ConditionConfig()
        modes = torch.tensor([MODES.index(request.mode) for request in requests])
        placed = [_placed(r, shape, latent_shape, codec, conditions) for r in requests]
        masks = frame_masks(modes, latent_shape[1], conditions)
        references = References(torch.stack(placed), masks)
    return EncodedRequests(latent_shape, encoded, null, references)


def _encoded(encoder: TextEncoder, captions: Sequence[str]) -> Text:
    """Return encoded captions; they are encoded one by one, which bounds the memory."""
    pairs = [encoder.encode([caption]) for caption in captions]
    return Text(*(torch.cat(parts).cpu() for parts in zip(*pairs, strict=True)))


@dataclass(frozen=True)
class ReferencePart:
    """The frames of a reference file that fill one section of a clip.

    Attributes:
        section: the latent frames of the clip that are filled.
        shape: number and size of the frames in the reference file, and its frame rate.
        first, interval: index in the file of the first frame taken, and how many frames further
            the next one is; fractions are allowed.
        count: number of frames taken.
    """

    section: Section
    shape: ClipShape
    first: int | float
    interval: int | float
    count: int


def reference_parts(
    request: ClipRequest,
    shape: SampleShape,
    codec: VideoCodec,
    conditions: ConditionConfig,
) -> list[ReferencePart]:
    """Return which frames of the reference file fill which part of the clip, as the mode needs.

    Only the header of the file is read.

    Raises:
        DataError: the reference cannot be read, or the reference or the clip is too short for the
            mode.
    """
    assert request.reference is not None
    latent_frames = codec.latent_shape(shape.num_frames, shape.height, shape.width)[1]
    header = probe(Clip(request.reference, request.text))
    # Take frames at the same rate as training does: that of the clips, or near it.
    exact = shape.fps if shape.encode.video_fps else None
    interval = subsampling(header.fps, shape.fps, exact)[0]
    parts = []
    for section in sections(request.mode, latent_frames, conditions):
        count = (section.length - 1) * codec.temporal + 1
        last = interval * (count - 1)
        if header.num_frames <= last:
            raise DataError(
                f"The reference {request.reference} has {header.num_frames} frame(s) of "
                f"{header.fps:g} per second, but the mode {request.mode} needs "
                f"{math.floor(last) + 1}; give a longer one, or take an i2v mode."
            )
        first = header.num_frames - 1 - last if section.start else 0
        parts.append(ReferencePart(section, header, first, interval, count))
    return parts


def _placed(
    request: ClipRequest,
    shape: SampleShape,
    latent_shape: tuple[int, int, int, int],
    codec: VideoCodec,
    conditions: ConditionConfig,
) -> Tensor:
    """Return latents ``[c, t, h, w]`` with a request's encoded reference frames, zero elsewhere."""
    placed = []
    if request.reference is not None:
        clip = Clip(request.reference, request.text)
        for part in reference_parts(request, shape, codec, conditions):
            pixels = decode(
                clip,
                part.first,
                part.interval,
                part.count,
                (shape.height, shape.width),
                shape=part.shape,
                blend=shape.encode.video_blend,
                background=shape.encode.video_background,
            )
            # Encode each section separately, as in training.
            placed.append((part.section, codec.encode(pixels[None])[0].cpu()))
    return place_references(placed, latent_shape, torch.float32)
