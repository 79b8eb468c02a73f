"""The inputs and the state of a sequence, as a checkpoint can hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import CheckpointError, DataError
from megatron_ext.video.streaming.config import StreamingConfig

NEVER = -1
"""The frame of a switch that does not come."""


@dataclass(frozen=True)
class Prompts:
    """The inputs that the samples of a sequence are made from.

    Attributes:
        text: embeddings, ``[b, l, d]``.
        text_after: embeddings after the switch; needed where sequences switch.
        start: clean latents of given first frames, ``[b, t, c, h, w]``; whole blocks, and fewer
            than a clip.
    """

    text: Tensor
    text_after: Tensor | None = None
    start: Tensor | None = None


PromptSource = Callable[[Sequence[int]], Prompts]
"""Gives the prompts of samples, a function of their numbers in the run."""


def second_prompt(prompts: Prompts, batch: int, *, switches: bool) -> Tensor:
    """Return the second prompt ``[b, l, d]``; empty if the sequence has no switch.

    Raises:
        DataError: it is needed and missing, or a prompt does not have the batch size.
    """
    after = prompts.text_after
    if switches and after is None:
        raise DataError(
            "the prompts have no `text_after`, but sequences switch to a second prompt; give "
            "pairs of prompts, or turn `switch_prompts` off."
        )
    for name, text in (("text", prompts.text), ("text_after", after)):
        if text is not None and (text.dim() != 3 or text.size(0) != batch):
            raise DataError(
                f"`{name}` has the shape {list(text.shape)}, but must be [{batch}, l, d], one "
                "for each sample."
            )
    return after if switches and after is not None else prompts.text.new_empty(0)


def given_frames(prompts: Prompts, like: Tensor, streaming: StreamingConfig) -> Tensor:
    """Return given first frames ``[b, t, c, h, w]``; t is 0 if there are none.

    Args:
        prompts: inputs of the sequence.
        like: ``[b, 0, c, h, w]``, which gives sizes, dtype and device.
        streaming: gives the sizes of a block and of a clip.

    Raises:
        DataError: frames of another size, or not whole blocks, or as many as a clip.
    """
    if prompts.start is None:
        return like
    start, block = prompts.start, streaming.frame_block
    sizes = (start.shape[0], *start.shape[2:]) == (like.shape[0], *like.shape[2:])
    if not sizes or start.size(1) % block or start.size(1) >= streaming.chunk_frames:
        raise DataError(
            f"`start` has the shape {list(start.shape)}, but must be [{like.size(0)}, t, "
            f"{', '.join(map(str, like.shape[2:]))}] with whole blocks of {block} frames, fewer "
            f"than a chunk ({streaming.chunk_frames})."
        )
    return start.to(like)


@dataclass
class SequenceState:
    """A sequence of one replica. Random numbers have no state, they follow these numbers.

    Attributes:
        sequence: its number in the run.
        consumed_samples: number in the run of the first of its samples, over all replicas.
        chunk: clips generated so far, by the name that checkpoints have for them.
        current_length: frames so far, given ones among them.
        max_length: frames after which it ends at the latest.
        switch_frame: first frame under the second prompt, at the start of a block, or `NEVER`.
        has_switched: the second prompt is the current one, 0 or 1.
        previous: last frames as generated, at most a clip, ``[b, t, c, h, w]``.
        sink: first frames as generated, ``[b, t, c, h, w]``.
        text: current prompt, ``[b, l, d]``.
        text_after: second prompt; empty if there is none.
    """

    sequence: int
    consumed_samples: int
    chunk: int
    current_length: int
    max_length: int
    switch_frame: int
    has_switched: int
    previous: Tensor
    sink: Tensor
    text: Tensor
    text_after: Tensor

    def switches_before(self, frame: int) -> bool:
        """Return whether the switch is still to come, and lies before a frame."""
        return not self.has_switched and NEVER < self.switch_frame < frame

    def extended(self, new: Tensor, *, kept: int, sinks: int) -> SequenceState:
        """Return the state after another clip.

        Args:
            new: new frames, ``[b, t, c, h, w]``, which are cut from their graph.
            kept: how many of the newest frames to keep.
            sinks: how many of the first frames to keep.
        """
        known = torch.cat([self.previous, new.detach()], dim=1)
        length = self.current_length + new.size(1)
        return replace(
            self,
            chunk=self.chunk + 1,
            current_length=length,
            previous=known[:, -kept:].clone(),
            sink=self.first_frames(known, length, sinks).clone(),
        )

    def first_frames(self, known: Tensor, length: int, sinks: int) -> Tensor:
        """Return the first frames of the sequence, as far as they exist.

        Args:
            known: newest frames, up to ``length``, ``[b, t, c, h, w]``.
            length: frames so far.
            sinks: how many are wanted.
        """
        return known[:, :sinks] if known.size(1) == length else self.sink

    def state_dict(self) -> dict[str, Any]:
        """Return every attribute by name; tensors are not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def stored_state(stored: Mapping[str, Any], like: Tensor, clip_frames: int) -> SequenceState:
    """Return the state that `SequenceState.state_dict` gave.

    Args:
        stored: read from a checkpoint.
        like: ``[b, 0, c, h, w]``, whose sizes, dtype and device latents must have.
        clip_frames: ``--chunk-frames`` of this run.

    Raises:
        CheckpointError: an entry is missing, or belongs to other sizes.
    """
    names = [field.name for field in fields(SequenceState)]
    missing = [name for name in names if name not in stored]
    if missing:
        raise CheckpointError(
            f"the stored streaming state lacks {', '.join(missing)}; resume without it to begin a "
            "new sequence."
        )
    values = {name: stored[name] for name in names}
    for name, value in values.items():
        if isinstance(value, Tensor):
            dtype = like.dtype if name in ("previous", "sink") else value.dtype
            values[name] = value.to(like.device, dtype)
        else:
            values[name] = int(value)
    for name in ("previous", "sink"):
        _check_sizes(name, values[name].shape, like.shape)
    state = SequenceState(**values)
    kept, wanted = state.previous.size(1), min(clip_frames, state.current_length)
    if kept != wanted:
        raise CheckpointError(
            f"the stored sequence keeps its last {kept} frames, but `chunk_frames` "
            f"({clip_frames}) needs {wanted}; resume with the value that it was saved with, or "
            "begin a new sequence."
        )
    return state


def _check_sizes(name: str, shape: torch.Size, wanted: torch.Size) -> None:
    if (shape[0], *shape[2:]) != (wanted[0], *wanted[2:]):
        raise CheckpointError(
            f"the stored `{name}` frames have the shape {list(shape)}, but this run's are "
            f"[{wanted[0]}, t, {', '.join(map(str, wanted[2:]))}]; resume with the batch size and "
            "the latent size that they were saved with, or begin a new sequence."
        )
