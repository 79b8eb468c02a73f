"""Keys and values of the text in every block, kept between passes without gradient."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_ext.models.causal_video.attention import KeyValue


class TextMemo:
    """What the blocks make of one text; another text empties it.

    Args:
        num_blocks: transformer blocks.

    Attributes:
        text: a copy of the text, ``[b, l, text_width]``; None at first.
        key_values: of each block, ``[l, b, n, d]`` each.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.clear()

    @property
    def is_filled(self) -> bool:
        """Every block has its keys and values."""
        return len(self.key_values) == self.num_blocks

    def clear(self) -> None:
        """Forget the text, at a new sequence or when the weights have changed."""
        self.text: Tensor | None = None
        self.key_values: dict[int, KeyValue] = {}
        self._source: tuple[weakref.ref[Tensor], int] | None = None

    def begin(self, text: Tensor) -> bool:
        """Whether it is filled for this text ``[b, l, text_width]``; begins anew if not."""
        if self.is_filled and self._is_of(text):
            return True
        self.clear()
        self.text = text.detach().clone()
        self._source = weakref.ref(text), _version(text)
        return False

    def _is_of(self, text: Tensor) -> bool:
        """The very tensor, unchanged, tells so without a look at its values on the device."""
        if self._source is not None:
            source, version = self._source
            if source() is text and version == _version(text) >= 0:
                return True
        known = self.text
        return (
            known is not None and known.shape == text.shape and torch.equal(known, text.to(known))
        )

    def state_dict(self) -> dict[str, Any]:
        """What it holds; weights may have changed since it was made, so it is not made again."""
        return {"text": self.text, "key_values": dict(self.key_values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.clear()
        self.text, self.key_values = state["text"], dict(state["key_values"])


def _version(text: Tensor) -> int:
    """Number of writes to a tensor; -1 for those that do not count them."""
    return -1 if text.is_inference() else text._version
