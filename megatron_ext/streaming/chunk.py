"""A chunk of a sequence, as critic and teacher see it, and which of its frames are trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.streaming.network import FirstFrame
from megatron_ext.streaming.rollout import ExitStep


@dataclass(frozen=True)
class TrainedBlock:
    """A block whose exit step is trained.

    Attributes:
        step: see `ExitStep`.
        frames: of it, in the chunk.
    """

    step: ExitStep
    frames: slice


@dataclass(frozen=True)
class StreamChunk:
    """The newest frames of a sequence.

    Attributes:
        latents: X, ``[b, t, c, h, w]``; without gradient, but for one-graph generation.
        mask: frames that count in the losses, bool ``[b, t]``: new ones, made under ``text``.
        text: current prompt, which the losses take for the whole chunk, ``[b, l, d]``.
        blocks: to be run again with gradient; none if the chunk was generated for the critic.
        samples: numbers in the run of the b samples.
        sequence: number of the sequence in the run.
        number: of the chunk in the sequence.
        first_new: absolute number of the first new frame.
        end: absolute number of the frame after the newest.
        exit_step: denoising step at which its new blocks end, counted from 0; None if they differ.
    """

    latents: Tensor
    mask: Tensor
    text: Tensor
    blocks: tuple[TrainedBlock, ...]
    samples: range
    sequence: int
    number: int
    first_new: int
    end: int
    exit_step: int | None = None


def assembled(
    known: Tensor, *, frames: int, first_frame: FirstFrame | None, whole_history: bool
) -> tuple[Tensor, bool]:
    """The frames of a chunk, and whether the first of them is encoded anew.

    Teacher and critic were trained on clips, whose first latent frame is that of an image. Where
    frames come before the chunk, its own first frame is replaced by such a latent, without
    gradient.

    Args:
        known: newest frames, at least ``frames`` of them, ``[b, t, c, h, w]``.
        frames: of the chunk.
        first_frame: encodes anew; None leaves all frames as they are.
        whole_history: ``first_frame`` gets all known frames up to the chunk's first, else only
            those of the chunk.

    Returns:
        ``[b, frames, c, h, w]`` and a bool.
    """
    chunk = known[:, -frames:]
    if first_frame is None or known.size(1) == frames:
        return chunk, False
    history = known[:, : 1 - frames] if whole_history else chunk[:, :1]
    with torch.no_grad():
        image = first_frame(history.detach()).to(chunk.dtype)
    return torch.cat([image, chunk[:, 1:]], dim=1), True


def new_frame_mask(*, frames: int, first_counted: int, encoded_anew: bool) -> Tensor:
    """Frames of a chunk that count, bool ``[frames]``.

    Args:
        frames: of the chunk.
        first_counted: first of them that is new and made under the current prompt.
        encoded_anew: the first frame of the chunk is no generated frame.
    """
    return torch.arange(frames) >= max(first_counted, int(encoded_anew))
