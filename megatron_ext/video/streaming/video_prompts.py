"""The prompts of long videos: captions, and the frames at which they give way to others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.sampling.requests import read_prompts
from megatron_ext.video.streaming.config import StreamingConfig, StreamingSampleConfig


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
class VideoPrompt:
    """The captions of one long video.

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
        """Return the frames of the switches."""
        return tuple(switch.frame for switch in self.switches)

    @property
    def title(self) -> str:
        """Return all captions in a line."""
        return " > ".join([self.text, *(switch.text for switch in self.switches)])


def read_video_prompts(path: str | os.PathLike[str]) -> list[VideoPrompt]:
    """Read a text file with a caption in each line, or a jsonl.

    Rows of a jsonl have ``text``, and may have ``switches``, a list of ``{"frame": latent frame,
    "text": caption}``. Empty lines are left out.

    Raises:
        DataError: no such file, a row that cannot be read, or no row at all.
    """
    return read_prompts(path, lambda text, _: VideoPrompt(text), _prompt, VideoPrompt)


def _prompt(row: dict[str, Any], source: Path) -> VideoPrompt:
    switches = row.get("switches") or []
    if not isinstance(switches, list):
        raise TypeError(f"`switches` {switches!r} is no list")
    return VideoPrompt(row["text"].strip(), tuple(_switch(entry) for entry in switches))


def _switch(entry: Any) -> Switch:
    if not isinstance(entry, dict) or entry.keys() != {"frame", "text"}:
        raise ValueError(f"a switch must have `frame` and `text`, but is {entry!r}")
    frame, text = entry["frame"], entry["text"]
    if type(frame) is not int or not isinstance(text, str):
        raise TypeError(f"a switch needs an integer and a text, but is {entry!r}")
    return Switch(frame, text.strip())


def at_block_starts(
    prompts: Sequence[VideoPrompt], *, block: int, num_frames: int
) -> list[VideoPrompt]:
    """Return prompts whose switches lie where they take effect, at the next start of a block.

    Args:
        block: latent frames that are made under one caption.
        num_frames: latent frames of the videos.

    Raises:
        DataError: a switch beyond the last block, or two in one block.
    """
    moved = []
    for prompt in prompts:
        starts = [-(-frame // block) * block for frame in prompt.frames]
        last = num_frames - block
        if starts and max(starts) > last:
            raise DataError(
                f"The prompt {prompt.text!r} switches at latent frame {max(prompt.frames)}, but "
                f"the last frame block begins at {last}; switch earlier, or sample longer videos "
                "with `--sample-latent-frames`."
            )
        if len({*starts}) < len(starts):
            raise DataError(
                f"The prompt {prompt.text!r} switches at frames "
                f"{', '.join(map(str, prompt.frames))}, two of them in one block of {block} "
                "frames, which is made under one prompt; move them apart."
            )
        switches = tuple(
            replace(switch, frame=start)
            for switch, start in zip(prompt.switches, starts, strict=True)
        )
        moved.append(replace(prompt, switches=switches))
    return moved


def video_prompts(
    sample: SampleConfig, own: StreamingSampleConfig, streaming: StreamingConfig
) -> list[VideoPrompt]:
    """Return the prompts that the flags give, with switches at the starts of blocks.

    Raises:
        ConfigError, DataError: see `read_video_prompts` and `at_block_starts`.
    """
    if sample.sample_texts is None:
        assert sample.sample_prompts is not None
        prompts = read_video_prompts(sample.sample_prompts)
    elif own.sample_second_texts is None:
        prompts = [VideoPrompt(text) for text in sample.sample_texts]
    else:
        frame = own.switch_frame(streaming)
        pairs = zip(sample.sample_texts, own.sample_second_texts, strict=True)
        prompts = [VideoPrompt(first, (Switch(frame, second),)) for first, second in pairs]
    num_frames = own.num_frames(streaming)
    return at_block_starts(prompts, block=streaming.frame_block, num_frames=num_frames)
