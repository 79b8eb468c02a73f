"""A text encoder without weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.config.encoding import HASHED, TextEncoderConfig

_WORD = re.compile(r"[^\W_]+")


class HashedWords:
    """Every word is a fixed random vector: no weights, no training, and no idea of meaning.

    Row i holds the vector of word i, rows after the last word are zero; the pooled vector is the
    sum over the words, in other vectors, divided by the root of their number. The empty caption is
    all zeros. Lower case; digits and letters only, so "a cat." and "a Cat" are the same.
    """

    def __init__(self, config: TextEncoderConfig) -> None:
        self.length = config.text_length
        self.width, self.pooled_width = config.text_width, config.pooled_width

    @property
    def identity(self) -> dict[str, Any]:
        """See `TextEncoder.identity`."""
        sizes = {"length": self.length, "width": self.width, "pooled_width": self.pooled_width}
        return {"text_encoder": HASHED, **sizes}

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See `TextEncoder.encode`."""
        rows = torch.zeros(len(captions), self.length, self.width)
        pooled = torch.zeros(len(captions), self.pooled_width)
        for i, caption in enumerate(captions):
            words = _WORD.findall(caption.lower())
            for j, word in enumerate(words[: self.length]):
                rows[i, j] = _word_vector("row", word, self.width)
            for word in words:
                pooled[i] += _word_vector("pooled", word, self.pooled_width)
            pooled[i] /= max(1, len(words)) ** 0.5
        return rows, pooled


@lru_cache(maxsize=1 << 16)
def _word_vector(salt: str, word: str, width: int) -> Tensor:
    """Signs ``[width]`` of variance 1, from the word's hash, the same on every machine."""
    seed = int.from_bytes(
        hashlib.blake2b(f"{salt}\0{word}".encode(), digest_size=16).digest(), "big"
    )
    raw = np.random.PCG64(seed).random_raw(width)
    return torch.from_numpy((raw >> np.uint64(63)).astype(np.float32) * 2 - 1)
