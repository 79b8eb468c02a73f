"""Where a replica stands in its sequence, as tensors and integers that a checkpoint can hold.

The first frame of a chunk, encoded anew by the video codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import CheckpointError
from megatron_ext.video.data.codec import VideoCodec

NEVER = -1
"""The frame of a switch that does not come."""


@dataclass
class SequenceState:
    """A sequence of one replica. Random numbers have no state, they follow these numbers.

    Attributes:
        sequence: its number in the run.
        consumed_samples: number in the run of the first of its samples, over all replicas.
        chunk: chunks generated so far.
        current_length: frames so far, given ones among them.
        max_length: frames after which it ends at the latest.
        switch_frame: first frame under the second prompt, at the start of a block, or `NEVER`.
        has_switched: the second prompt is the current one, 0 or 1.
        previous: last frames as generated, at most a chunk, ``[b, t, c, h, w]``.
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
        """Whether the switch is still to come, and lies before a frame."""
        return not self.has_switched and NEVER < self.switch_frame < frame

    def extended(self, new: Tensor, *, chunk_frames: int, sinks: int) -> SequenceState:
        """After another chunk of new frames ``[b, t, c, h, w]``, which are cut from their graph."""
        known = torch.cat([self.previous, new.detach()], dim=1)
        return replace(
            self,
            chunk=self.chunk + 1,
            current_length=self.current_length + new.size(1),
            previous=known[:, -chunk_frames:].clone(),
            sink=self.first_frames(known, self.current_length + new.size(1), sinks).clone(),
        )

    def first_frames(self, known: Tensor, length: int, sinks: int) -> Tensor:
        """The first frames of the sequence, as far as they exist.

        Args:
            known: newest frames, up to ``length``, ``[b, t, c, h, w]``.
            length: frames so far.
            sinks: how many are wanted.
        """
        return known[:, :sinks] if known.size(1) == length else self.sink

    def state_dict(self) -> dict[str, Any]:
        """Every attribute by name; tensors are not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def stored_state(stored: Mapping[str, Any], like: Tensor, chunk_frames: int) -> SequenceState:
    """The state that `SequenceState.state_dict` gave.

    Args:
        stored: from a checkpoint.
        like: ``[b, 0, c, h, w]``, whose sizes, dtype and device latents must have.
        chunk_frames: of this run.

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
    kept, wanted = state.previous.size(1), min(chunk_frames, state.current_length)
    if kept != wanted:
        raise CheckpointError(
            f"the stored sequence keeps its last {kept} frames, but `chunk_frames` "
            f"({chunk_frames}) needs {wanted}; resume with the value that it was saved with, or "
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


@dataclass(frozen=True)
class CodecFirstFrame:
    """Decodes latents and encodes their last pixel frame as an image; a `FirstFrame`.

    Attributes:
        codec: causal in time, so that an image is one latent frame.
    """

    codec: VideoCodec

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        """``[b, 1, c, h, w]`` of the newest of ``[b, t, c, h, w]``."""
        pixels = self.codec.decode(latents.float().transpose(1, 2))
        return self.codec.encode(pixels[:, :, -1:]).transpose(1, 2).to(latents)
