"""Tiktoken vocabularies in NVIDIA's JSON form (a list of rank, token_bytes, token_str)."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.data.tokenizers.base import Ids, Tokenizer, require_package
from megatron_ext.errors import ConfigError, DataError

DEFAULT_VOCAB_SIZE = 1 << 17
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class TikTokenizer(Tokenizer):
    """Special tokens take the first ids, the ranks of the file follow; eod is `</s>`."""

    kind = "TikTokenizer"

    def __init__(
        self,
        path: str,
        *,
        pattern: str = "v2",
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
    ) -> None:
        super().__init__(
            path,
            {
                "pattern": pattern,
                "vocab_size": vocab_size,
                "num_special_tokens": num_special_tokens,
                "special_tokens": list(special_tokens),
            },
        )
        tiktoken = require_package("tiktoken", self.kind)
        names = _special_names(pattern, vocab_size, num_special_tokens, special_tokens)
        self._special = {name: i for i, name in enumerate(names)}
        self._vocab_size = vocab_size
        self._encoding: Any = tiktoken.Encoding(
            name=Path(path).parent.name,
            pat_str=PATTERNS[pattern],
            mergeable_ranks=_ranks(path, vocab_size - num_special_tokens, num_special_tokens),
            special_tokens=self._special,
        )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos(self) -> int:
        return self._special["</s>"]

    @property
    def bos(self) -> int:
        return self._special["<s>"]

    @property
    def pad(self) -> int:
        return self._special["<pad>"]

    @property
    def unk(self) -> int:
        return self._special["<unk>"]

    def tokenize(self, text: str) -> list[int]:
        return list(self._encoding.encode(text, allowed_special="all"))

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        return [self._encoding.encode_to_numpy(text, allowed_special="all") for text in texts]

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        first = len(self._special) if skip_special_tokens else 0
        return str(self._encoding.decode([i for i in ids if i >= first]))


def _special_names(
    pattern: str, vocab_size: int, count: int, special_tokens: Sequence[str]
) -> list[str]:
    if pattern not in PATTERNS:
        raise ConfigError(f"`--tiktoken-pattern` ({pattern}) must be v1 or v2.")
    missing = [token for token in SPECIAL_TOKENS if token not in special_tokens]
    if missing:
        raise ConfigError(
            f"`--tokenizer-special-tokens` lacks {' '.join(missing)}, which TikTokenizer needs; "
            f"give all of {' '.join(SPECIAL_TOKENS)}."
        )
    if len(set(special_tokens)) != len(special_tokens):
        raise ConfigError("`--tokenizer-special-tokens` names a token twice; name each once.")
    if not len(special_tokens) <= count < vocab_size:
        raise ConfigError(
            f"`--tiktoken-num-special-tokens` ({count}) must be at least the number of special "
            f"tokens ({len(special_tokens)}) and below `--vocab-size` ({vocab_size})."
        )
    filler = [f"<SPECIAL_{i}>" for i in range(len(special_tokens), count)]
    return [*special_tokens, *filler]


def _ranks(path: str, count: int, first: int) -> dict[bytes, int]:
    """Bytes of the first `count` tokens to ids from `first` on."""
    try:
        entries = json.loads(Path(path).read_bytes())
        tokens = [base64.b64decode(entry["token_bytes"]) for entry in entries[:count]]
        ordered = all(entry["rank"] == i for i, entry in enumerate(entries[:count]))
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise DataError(
            f"`--tokenizer-model` ({path}) is not a tiktoken vocabulary in JSON "
            f"({type(error).__name__}: {error}); give a list of rank, token_bytes, token_str."
        ) from None
    if len(tokens) < count:
        raise DataError(
            f"`--tokenizer-model` ({path}) holds {len(tokens)} tokens, but `--vocab-size` less "
            f"`--tiktoken-num-special-tokens` asks for {count}; use `--vocab-size "
            f"{len(tokens) + first}`."
        )
    if not ordered or any(tokens[i] != bytes([i]) for i in range(min(256, count))):
        raise DataError(
            f"`--tokenizer-model` ({path}) must list its tokens by rank, the 256 single bytes "
            "first; the file is damaged or of another kind."
        )
    return {token: first + i for i, token in enumerate(tokens)}
