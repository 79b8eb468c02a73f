"""Reads, checks and encodes the prompts of training and of long videos."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.parallel.collectives import on_first_of_replica, share
from megatron_ext.video.config.encoding import CodecConfig, TextEncoderConfig
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.config.window import FrameBlocks
from megatron_ext.video.data.clips import Clip
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.frames import decode, probe
from megatron_ext.video.data.randomness import generator
from megatron_ext.video.data.text_encoders import TextEncoder, build_text_encoder
from megatron_ext.video.sampling.requests import (
    bad_row,
    given_starts,
    read_lines,
    read_prompts,
    read_row,
    start_of,
    whole_number,
)
from megatron_ext.video.streaming.config import StreamingConfig, StreamingSampleConfig
from megatron_ext.video.streaming.sequence import Prompts

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext


@dataclass(frozen=True)
class PromptRow:
    """A row of a file of prompts, for one video.

    Attributes:
        second_text: prompt to which the sequence switches; None for no switch.
        start: path of an image, video or folder of images that gives the first frames, or None.
    """

    text: str
    second_text: str | None = None
    start: str | None = None


def read_training_prompts(config: StreamingConfig) -> Sequence[PromptRow]:
    """Read the prompts of a training run from ``--prompts-path`` and ``--second-prompts-path``.

    A file has one prompt per line, or is a jsonl. A row of a jsonl has ``text``, and may have
    ``second_text``, and ``image`` or ``video``, a path relative to the file. All videos of a step
    begin and switch in the same way. So either all rows or none have a second text, and either all
    or none have an image or video.

    Raises:
        DataError: a file cannot be read or is empty, a row is invalid, or the two files do not fit
            together.
    """
    assert config.prompts_path is not None
    first = _rows("--prompts-path", config.prompts_path)
    if config.second_prompts_path is None:
        return first
    second = _rows("--second-prompts-path", config.second_prompts_path)
    if len(first) != len(second):
        raise DataError.about(
            "--second-prompts-path",
            config.second_prompts_path,
            f"has {len(second)} prompts, but must have {len(first)}, one for each of "
            "`--prompts-path`",
        )
    extras = [value for row in second for value in (row.second_text, row.start)]
    for flag, path, taken in (
        ("--prompts-path", config.prompts_path, [row.second_text for row in first]),
        ("--second-prompts-path", config.second_prompts_path, extras),
    ):
        if any(value is not None for value in taken):
            raise DataError.about(
                flag,
                path,
                "must have nothing but the first text and what the sequences begin with "
                "beside `--second-prompts-path`, which must have nothing but `text`",
                "leave the second texts in one of them",
            )
    return [
        PromptRow(row.text, after.text, row.start) for row, after in zip(first, second, strict=True)
    ]


def prompt_checks(config: StreamingConfig) -> list[Callable[[], Any]]:
    """Return functions that each read and check one file of prompts of a training run."""
    paths = {
        "--prompts-path": config.prompts_path,
        "--second-prompts-path": config.second_prompts_path,
    }
    return [partial(_rows, flag, path) for flag, path in paths.items() if path is not None]


def _rows(flag: str, path: str) -> list[PromptRow]:
    """Read a text file or jsonl of prompts; return a row for each line that is not blank.

    ``flag`` is the flag that gave ``path``; errors name it.
    """
    source = Path(path)
    lines = read_lines(source, f"`{flag}` ({path})")
    if source.suffix != ".jsonl":
        return [PromptRow(line) for _, line in lines]
    rows = [_row(line, source, number) for number, line in lines]
    for name, what in (("second_text", "a `second_text`"), ("start", "an `image` or a `video`")):
        has = [getattr(row, name) is not None for row in rows]
        if any(has) and not all(has):
            raise bad_row(source, lines[has.index(False)][0], f"has not {what}, as others have")
    return rows


def _row(line: str, source: Path, number: int) -> PromptRow:
    names = ("text", "second_text", "image", "video")
    row = read_row(line, source, number, names, texts=names)
    starts = [row[name] for name in ("image", "video") if row.get(name)]
    if len(starts) > 1:
        raise bad_row(source, number, "has an `image` and a `video`, but may have one")
    start = source.parent / starts[0] if starts else None
    if start is not None and not start.exists():
        raise bad_row(source, number, f"begins with {start}, which does not exist")
    return PromptRow(row["text"], row.get("second_text"), None if start is None else str(start))


@dataclass(frozen=True)
class Switch:
    """The latent frame at which a video switches to another caption, ``text``."""

    frame: int
    text: str


@dataclass(frozen=True)
class VideoPrompt:
    """The first caption of a long video, and its switches to other captions.

    Attributes:
        seed: seed of the noise. If it is given, the video does not depend on the prompt's number;
            if None, the noise depends on ``--sample-seed`` and on the prompt's number.
        start: path of an image, video or folder of images that gives the first block, or None.

    Raises:
        ConfigError: the frames of the switches are not above 0 and increasing.
    """

    text: str
    switches: tuple[Switch, ...] = ()
    seed: int | None = None
    start: str | None = None

    def __post_init__(self) -> None:
        frames = [0, *self.frames]
        if any(a >= b for a, b in zip(frames, frames[1:], strict=False)):
            raise ConfigError(
                f"The switches of the prompt {self.text!r} are at frames "
                f"{', '.join(map(str, self.frames))}, but must be above 0 and rising; sort them."
            )

    @property
    def frames(self) -> tuple[int, ...]:
        """Return the latent frames at which the video switches."""
        return tuple(switch.frame for switch in self.switches)

    @property
    def title(self) -> str:
        """Return all captions in one line, separated by " > "."""
        return " > ".join([self.text, *(switch.text for switch in self.switches)])


def read_video_prompts(path: str | os.PathLike[str]) -> list[VideoPrompt]:
    """Read prompts of long videos from a text file with one caption per line, or from a jsonl.

    A row of a jsonl has ``text``. It may have ``switches``, a list of
    ``{"frame": latent frame, "text": caption}``; ``seed``; and ``image`` or ``video``, a path
    relative to the file.
    """
    names = ("text", "switches", "seed", "image", "video")
    return read_prompts(path, VideoPrompt, _prompt, names=names, texts=("image", "video"))


def _prompt(row: dict[str, Any], source: Path) -> VideoPrompt:
    switches = row.get("switches") or []
    if not isinstance(switches, list):
        raise TypeError(f"`switches` {switches!r} is no list")
    name = start_of(row, ("image", "video"))
    return VideoPrompt(
        row["text"].strip(),
        tuple(_switch(entry) for entry in switches),
        whole_number(row, "seed", at_least=0),
        None if name is None else str(source.parent / row[name]),
    )


def _switch(entry: Any) -> Switch:
    if not isinstance(entry, dict) or entry.keys() != {"frame", "text"}:
        raise ValueError(f"a switch must have `frame` and `text`, but is {entry!r}")
    frame = entry["frame"]
    text = entry["text"]
    if type(frame) is not int or not isinstance(text, str):
        raise TypeError(f"a switch needs an integer and a text, but is {entry!r}")
    return Switch(frame, text.strip())


def at_block_starts(
    prompts: Sequence[VideoPrompt], *, blocks: FrameBlocks, num_frames: int
) -> list[VideoPrompt]:
    """Return the prompts with each switch inside a block moved to the start of the next block.

    Raises:
        DataError: a switch is after the start of the last block, or two switches would coincide.
    """
    moved = []
    for prompt in prompts:
        starts = [blocks.at_or_after(frame) for frame in prompt.frames]
        last = blocks.at_or_before(num_frames - 1)
        if starts and max(starts) > last:
            raise DataError(
                f"The prompt {prompt.text!r} switches at latent frame {max(prompt.frames)}, but "
                f"the last frame block begins at {last}; switch earlier, or sample longer videos "
                "with `--sample-latent-frames`."
            )
        if len({*starts}) < len(starts):
            raise DataError(
                f"The prompt {prompt.text!r} switches at frames "
                f"{', '.join(map(str, prompt.frames))}, two of them in one block of "
                f"{blocks.block} frames, which is made under one prompt; move them apart."
            )
        pairs = zip(prompt.switches, starts, strict=True)
        switches = tuple(Switch(start, switch.text) for switch, start in pairs)
        moved.append(replace(prompt, switches=switches))
    return moved


def video_prompts(
    sample: SampleConfig, own: StreamingSampleConfig, streaming: StreamingConfig
) -> list[VideoPrompt]:
    """Return the prompts that the flags in ``sample`` and ``own`` give for the videos to sample.

    Switches inside a block are moved to the start of the next block.
    """
    if sample.sample_texts is None:
        assert sample.sample_prompts is not None
        prompts = read_video_prompts(sample.sample_prompts)
    else:
        pairs = zip(sample.sample_texts, given_starts(sample)[1], strict=True)
        prompts = [VideoPrompt(text, start=start) for text, start in pairs]
        if own.sample_second_texts is not None:
            frame = own.switch_frame(streaming)
            prompts = [
                replace(prompt, switches=(Switch(frame, second),))
                for prompt, second in zip(prompts, own.sample_second_texts, strict=True)
            ]
    for prompt in prompts:
        if prompt.start is not None and not Path(prompt.start).exists():
            raise DataError(
                f"The prompt {prompt.text!r} begins with {prompt.start}, which does not exist; "
                "correct its path."
            )
    num_frames = own.num_frames(streaming)
    return at_block_starts(prompts, blocks=streaming.blocks, num_frames=num_frames)


def encode_captions(
    captions: Sequence[str],
    encoder: Callable[[], TextEncoder],
    shape: tuple[int, int],
    context: ParallelContext,
    device: torch.device,
) -> Tensor:
    """Encode n captions; return embeddings ``[n, l, d]`` float32 on all ranks.

    All ranks call this together.

    Args:
        encoder: a function that returns the encoder; it is called only on the first rank of each
            replica.
        shape: (l, d), length and width of an embedding.

    Raises:
        MegatronExtError: the encoder failed (raised on all ranks).
    """

    def encoded() -> Tensor:
        built = encoder()
        # Encode captions one by one, to limit the memory of large encoders.
        return torch.cat([built.encode([caption])[0] for caption in captions])

    embeddings = on_first_of_replica(encoded, "Encoding the prompts", context)
    return share(embeddings, (len(captions), *shape), context, device)


@torch.no_grad()
def given_block(
    codec: VideoCodec, path: str, frames: int, size: Sequence[int], device: torch.device
) -> Tensor:
    """Encode an image or video as the first block of a video, ``[1, frames, c, h, w]``.

    The cache holds whole blocks, so an image is repeated to fill a block of several frames.
    ``size`` is (height, width) of the latents. DataError is raised if a video is shorter than the
    block.
    """
    clip = Clip(path, "")
    count = (frames - 1) * codec.temporal + 1
    probed = probe(clip)
    if 1 < probed.num_frames < count:
        raise DataError(
            f"{path} has {probed.num_frames} frames, but a sequence begins with a block of "
            f"{frames} latent frames, which are {count}; give a longer video or an image."
        )
    height, width = (length * codec.spatial for length in size)
    shown = min(count, probed.num_frames)
    pixels = decode(clip, 0, 1, shown, (height, width), shape=probed)[None].to(device)
    pixels = pixels.expand(-1, -1, count, -1, -1) if shown == 1 else pixels
    return codec.encode(pixels).transpose(1, 2)


class FilePrompts:
    """Encodes the training prompts of the run's files; each epoch shuffles them differently.

    Prompts and given first frames are encoded when a sequence begins, on the first rank of each
    replica, and sent to its other ranks. All ranks of the run call each method together.

    Attributes:
        codec: the codec on the first rank of a replica if frames are to be encoded, else None.

    Raises:
        ConfigError: the encoders cannot be built (raised on all ranks).
        DataError: the prompts cannot be read, or the two files do not fit together.
    """

    def __init__(self, config: RunConfig, context: ParallelContext, device: torch.device) -> None:
        streaming = config.section(StreamingConfig)
        text = config.section(TextEncoderConfig)
        self._rows = read_training_prompts(streaming)
        self._context = context
        self._device = device
        self._seed = config.training.seed
        self._first_block = streaming.blocks.first
        self._latent = (streaming.sizes().channels, *streaming.latent_size)
        assert streaming.text_features is not None
        self._text = (text.text_length, streaming.text_features)
        encoder = partial(build_text_encoder, text, device)
        self._encoder = on_first_of_replica(encoder, "Loading the text", context)
        self.codec: VideoCodec | None = None
        if streaming.encode_first_frame or streaming.given_frames:
            codec = partial(build_codec, config.section(CodecConfig), device)
            self.codec = on_first_of_replica(codec, "Loading the codec", context)

    def __call__(self, samples: Sequence[int]) -> Prompts:
        """Return the encoded prompts of ``samples``, which are indices of samples in the run.

        Raises DataError on all ranks if given frames cannot be read.
        """
        rows = [self._row(sample) for sample in samples]
        second = [row.second_text for row in rows if row.second_text is not None]
        text = self.encode([row.text for row in rows] + second)
        after = text[len(rows) :] if second else None
        start = None
        if all(row.start is not None for row in rows):
            starts = on_first_of_replica(
                lambda: torch.cat([*map(self._given, rows)]), "Encoding given frames", self._context
            )
            shape = len(rows), self._first_block, *self._latent
            start = share(starts, shape, self._context, self._device)
        return Prompts(text[: len(rows)], after, start)

    def encode(self, captions: Sequence[str]) -> Tensor:
        """Encode n captions with the run's text encoder: ``[n, l, d]`` float32 on all ranks."""

        def encoder() -> TextEncoder:
            assert self._encoder is not None
            return self._encoder

        return encode_captions(captions, encoder, self._text, self._context, self._device)

    def first_frame(self, latents: Tensor) -> Tensor:
        """Decode ``latents``, ``[b, t, c, h, w]``, and encode their last frame again as an image.

        Return the latent frame of this image, ``[b, 1, c, h, w]``, with which a clip can begin. All
        ranks of a replica call this together and get the same result.
        """

        def image() -> Tensor:
            assert self.codec is not None
            return first_frame_latent(self.codec, latents)

        frame = on_first_of_replica(image, "Encoding the first frame", self._context)
        return share(frame, (len(latents), 1, *self._latent), self._context, self._device)

    def _given(self, row: PromptRow) -> Tensor:
        assert row.start is not None and self.codec is not None
        size = self._latent[1:]
        return given_block(self.codec, row.start, self._first_block, size, self._device)

    def _row(self, sample: int) -> PromptRow:
        epoch, place = divmod(sample, len(self._rows))
        order = generator(self._seed, epoch, "streaming prompts").permutation(len(self._rows))
        return self._rows[int(order[place])]


@torch.no_grad()
def first_frame_latent(codec: VideoCodec, latents: Tensor) -> Tensor:
    """Decode latents ``[b, t, c, h, w]``, and encode their last frame as an image.

    Returns ``[b, 1, c, h, w]``. The codec must be causal in time.
    """
    pixels = codec.decode(latents.float().transpose(1, 2))
    return codec.encode(pixels[:, :, -1:]).transpose(1, 2).to(latents)
