"""What all text encoders are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class TextEncoder(Protocol):
    """What preprocessing, online encoding and sampling need of a text encoder.

    Attributes:
        length: l, rows of an encoded caption.
        width: d, features of a row.
        pooled_width: e, features of the pooled vector, 0 where there is none.
    """

    length: int
    width: int
    pooled_width: int

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the embeddings; stored beside them and compared."""
        ...

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Embeddings ``[n, l, d]`` and pooled vectors ``[n, e]`` float32; "" is the null text."""
        ...
