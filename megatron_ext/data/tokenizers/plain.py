"""Tokenizers without a model: bytes, and ids written as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ext.data.tokenizers.base import Ids, Tokenizer


class ByteLevelTokenizer(Tokenizer):
    """Each UTF-8 byte is its own id; eos is 0, pad 1; `vocab_size` ids plus special tokens."""

    kind = "ByteLevelTokenizer"

    def __init__(self, vocab_size: int = 512, special_tokens: Sequence[str] = ()) -> None:
        super().__init__(None, {"vocab_size": vocab_size, "special": list(special_tokens) or None})
        self._vocab_size = vocab_size + len(special_tokens)
        self._first_special = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos(self) -> int:
        return 0

    @property
    def pad(self) -> int:
        return 1

    @property
    def unk(self) -> int:
        return 259

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        first = 2 if skip_special_tokens else 0
        return bytes(i for i in ids if first <= i < 256).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """Texts are integers joined by single spaces; eod is the id after the vocabulary."""

    kind = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        super().__init__(None, {"vocab_size": vocab_size})
        self._without_eod = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._without_eod + 1

    @property
    def eos(self) -> int:
        return self._without_eod

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(part) for part in text.split(" ")]
        except ValueError:
            raise ValueError(
                "the text is not integers joined by single spaces, as NullTokenizer needs"
            ) from None
        if any(not 0 <= i <= self._without_eod for i in ids):
            raise ValueError(f"an id is outside 0 to {self._without_eod} of NullTokenizer")
        return ids

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(str(i) for i in ids)
