"""What long videos are asked for: captions, and where they give way to others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.sampling.requests import read_prompts


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
