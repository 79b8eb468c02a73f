"""What sequences are made from: prompts, and frames that are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.streaming.options import StreamingOptions


@dataclass(frozen=True)
class Prompts:
    """What the samples of a sequence are made from.

    Attributes:
        text: embeddings, ``[b, l, d]``.
        text_after: those after the switch; needed where sequences switch.
        start: clean latents of given first frames, ``[b, t, c, h, w]``; whole blocks, and fewer
            than a chunk.
    """

    text: Tensor
    text_after: Tensor | None = None
    start: Tensor | None = None


class PromptSource(Protocol):
    """Gives the prompts of samples."""

    def __call__(self, samples: Sequence[int]) -> Prompts:
        """Prompts of samples, a function of their numbers in the run."""


def second_prompt(prompts: Prompts, batch: int, *, switches: bool) -> Tensor:
    """The second prompt ``[b, l, d]``; empty if the sequence has no switch.

    Raises:
        DataError: it is needed and missing, or a prompt has not the batch size.
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


def given_frames(prompts: Prompts, like: Tensor, options: StreamingOptions) -> Tensor:
    """Given first frames ``[b, t, c, h, w]``; t is 0 if there are none.

    Args:
        prompts: of the sequence.
        like: ``[b, 0, c, h, w]``, which gives sizes, dtype and device.
        options: see `StreamingOptions`.

    Raises:
        DataError: frames of another size, or not whole blocks, or as many as a chunk.
    """
    if prompts.start is None:
        return like
    start, block = prompts.start, options.block
    sizes = (start.shape[0], *start.shape[2:]) == (like.shape[0], *like.shape[2:])
    if not sizes or start.size(1) % block or start.size(1) >= options.chunk_frames:
        raise DataError(
            f"`start` has the shape {list(start.shape)}, but must be [{like.size(0)}, t, "
            f"{', '.join(map(str, like.shape[2:]))}] with whole blocks of {block} frames, fewer "
            f"than a chunk ({options.chunk_frames})."
        )
    return start.to(like)
