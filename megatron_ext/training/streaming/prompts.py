"""Prompts from files, one a line, as embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_ext.data.video.draws import generator
from megatron_ext.data.video.text_encoders import TextEncoder
from megatron_ext.errors import DataError
from megatron_ext.streaming.prompts import Prompts

if TYPE_CHECKING:
    from megatron_ext.config.streaming import StreamingConfig

Lines = Sequence[str]


def read_prompts(config: StreamingConfig) -> tuple[Lines, Lines | None]:
    """First prompts, and those that the sequences switch to.

    Raises:
        DataError: a file that cannot be read or is empty, or two of different lengths.
    """
    assert config.prompts_path is not None
    first = _lines("--prompts-path", config.prompts_path)
    if config.second_prompts_path is None:
        return first, None
    second = _lines("--second-prompts-path", config.second_prompts_path)
    if len(first) != len(second):
        raise DataError(
            f"`--second-prompts-path` ({config.second_prompts_path}) has {len(second)} prompts, "
            f"but must have {len(first)}, one for each of `--prompts-path`."
        )
    return first, second


def _lines(flag: str, path: str) -> list[str]:
    """Lines that are not blank."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"`{flag}` ({path}) must be a text file with one prompt a line, but cannot be read: "
            f"{error}."
        ) from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"`{flag}` ({path}) holds no prompt; write one a line.")
    return lines


class FilePrompts:
    """Prompts of samples, shuffled anew in each epoch; a `streaming.prompts.PromptSource`.

    A prompt is encoded once for each sequence that it begins.

    Args:
        first: see `read_prompts`.
        second: see `read_prompts`.
        encoder: of the text.
        seed: of the order.
        device: where the embeddings go.
    """

    def __init__(
        self,
        first: Lines,
        second: Lines | None,
        *,
        encoder: TextEncoder,
        seed: int,
        device: torch.device,
    ) -> None:
        self._first, self._second, self._encoder = first, second, encoder
        self._seed, self._device = seed, device

    def __call__(self, samples: Sequence[int]) -> Prompts:
        """Prompts of samples, a function of their numbers in the run."""
        lines = [self._line(sample) for sample in samples]
        after = None if self._second is None else self.encode([self._second[i] for i in lines])
        return Prompts(self.encode([self._first[i] for i in lines]), after)

    def encode(self, captions: Lines) -> torch.Tensor:
        """Embeddings, ``[n, l, d]``."""
        return self._encoder.encode(captions)[0].to(self._device)

    def _line(self, sample: int) -> int:
        epoch, place = divmod(sample, len(self._first))
        order = generator(self._seed, epoch, "streaming prompts").permutation(len(self._first))
        return int(order[place])
