"""Tokenizers from SentencePiece models, and from tiktoken vocabularies in NVIDIA's JSON format."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.disk.reading import UnreadableFile, read_json
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.tokenizers.base import (
    NO_TOKEN,
    FastKind,
    Tokenizer,
    require_package,
)

if TYPE_CHECKING:
    from megatron_ext.text.tokenizers.base import Ids
    from megatron_ext.text.tokenizers.boundaries import Boundary

_USER_DEFINED = 4
# The bytes of a user-defined piece in a serialized model: its score, then its type.
_USER_DEFINED_PIECE = re.compile(rb"\x15....\x18\x04", re.DOTALL)
_SEPARATOR = "▁"
# Fields of a serialized model's TrainerSpec and NormalizerSpec, and a value of the first.
_MODEL_TYPE, _SUFFIX = 3, 24
_DUMMY_PREFIX, _ESCAPE = 3, 5
_BPE = 2


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer from a SentencePiece `.model`; the end of a document (eod) has the id of eos.

    With `--tokenizer-sentencepiece-legacy`, each of ``special_tokens`` in a text becomes a single
    id: that of the model's piece with the same text, or else a new id after the vocabulary.
    """

    def __init__(self, kind: str, path: str, special_tokens: Sequence[str] = ()) -> None:
        super().__init__(path, {"special_tokens": list(special_tokens) or None})
        sentencepiece = require_package("sentencepiece", kind)
        self.kind = kind
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=path)
        except (RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:120]
            raise DataError.about(
                "--tokenizer-model",
                path,
                f"is not a SentencePiece model ({reason})",
                "give the path of a .model file",
            ) from None
        self._special = self._place(special_tokens)
        model = self._model
        self.vocab_size = max([model.get_piece_size(), *(i + 1 for i in self._by_id)])
        self.eos, self.bos, self.pad, self.unk = (
            int(i) for i in (model.eos_id(), model.bos_id(), model.pad_id(), model.unk_id())
        )

    def _place(self, tokens: Sequence[str]) -> dict[str, int]:
        """Choose an id for each special token; return the ids by the texts of the tokens.

        A token gets the id of the piece with the same text. If there is none, it gets the next free
        id after the vocabulary.
        """
        placed: dict[str, int] = {}
        fresh = self._model.get_piece_size()
        for token in tokens:
            number = self._model.piece_to_id(token)
            if number == self._model.unk_id():
                number, fresh = fresh, fresh + 1
            placed.setdefault(token, number)
        self._by_id = {i: token for token, i in placed.items()}
        return placed

    def tokenize(self, text: str) -> list[int]:
        # SentencePiece puts a separator before each text. Drop it after a special token, where the
        # text only continues.
        separator = self._model.piece_to_id(_SEPARATOR)
        ids: list[int] = []
        while True:
            matches = [(text.find(token), token) for token in self._special if token in text]
            if not matches:
                return ids + list(self._model.encode_as_ids(text))
            start, token = min(matches, key=lambda pair: pair[0])
            piece = self._model.encode_as_ids(text[:start])
            if ids and ids[-1] in self._by_id and piece and piece[0] == separator:
                piece = piece[1:]
            ids.extend(piece)
            ids.append(self._special[token])
            text = text[start + len(token) :]

    def token_id(self, text: str) -> int:
        number = int(self._special.get(text, self._model.piece_to_id(text)))
        return NO_TOKEN if number == self.unk else number

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        if self._special:
            return super().encode_batch(texts)
        ids: list[list[int]] = self._model.encode(list(texts), out_type=int, num_threads=1)
        return ids

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        pieces: list[str] = []
        run: list[int] = []
        for i in ids:
            special = self._by_id.get(i)
            if special is None and not (not skip_special_tokens and self._model.is_control(i)):
                run.append(i)
                continue
            pieces += [self._model.decode_ids(run), special or self._model.id_to_piece(i)]
            run = []
        return "".join([*pieces, self._model.decode_ids(run)])

    @cached_property
    def boundary(self) -> Boundary | None:
        return None if self._special else _boundary(self._model.serialized_model_proto())

    def fast_source(self) -> tuple[FastKind, str] | None:
        return None if self._special or self.path is None else ("sentencepiece", self.path)

    def control_texts(self) -> tuple[str, ...]:
        model = self._model
        every = list(range(self._model.get_piece_size()))
        kinds = (model.is_control(every), model.is_unknown(every), model.is_unused(every))
        texts = {
            model.id_to_piece(i) for i, marked in enumerate(zip(*kinds, strict=True)) if any(marked)
        }
        # The piece of a byte looks like <0x41>. If a text contains that, it must stay text.
        texts.add("<0x")
        texts.update(_user_defined(model.serialized_model_proto()))
        return tuple(sorted(texts))


def _user_defined(model: bytes) -> Iterator[str]:
    """Yield the texts of the user-defined pieces in a SentencePiece model.

    ``model`` is a protobuf message. Its field 1 is a piece, whose fields 1 and 3 are text and type.
    """
    if not _USER_DEFINED_PIECE.search(model):
        return  # Most models have none, and parsing all pieces is slow.
    for field, piece in _fields(model):
        if field == 1 and isinstance(piece, bytes):
            content: dict[int, Any] = dict(_fields(piece))
            if content.get(3) == _USER_DEFINED:
                yield content[1].decode("utf-8")


def _boundary(model: bytes) -> Boundary | None:
    """Return where a text may be cut for a SentencePiece model; None if nowhere.

    A BPE model merges symbols if the result is a piece. If the separator, which stands for a space,
    occurs only at the beginning of pieces, nothing is merged across a space. The part after it gets
    a separator of its own, so the space is left out.
    """
    from megatron_ext.text.tokenizers.boundaries import BETWEEN_WORDS

    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    pieces = set()
    for field, value in _fields(model):
        if field == 1 and isinstance(value, bytes):
            content: dict[int, Any] = dict(_fields(value))
            pieces.add(content.get(1, b"").decode("utf-8"))
        elif field == 2 and isinstance(value, bytes):
            trainer = dict(_fields(value))
        elif field == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value))
    # Their normalizations join no letter of ASCII with a space after it.
    is_known = normalizer.get(1, b"") in (b"identity", b"nfkc", b"nmt_nfkc")
    is_bpe = trainer.get(_MODEL_TYPE) == _BPE and not trainer.get(_SUFFIX)
    adds_separators = normalizer.get(_DUMMY_PREFIX, 1) and normalizer.get(_ESCAPE, 1)
    if not (is_bpe and is_known and adds_separators and _SEPARATOR in pieces):
        return None
    if any(_SEPARATOR in piece.lstrip(_SEPARATOR) for piece in pieces):
        return None
    return BETWEEN_WORDS


def _fields(buffer: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of each field of a protobuf message.

    The value is an int for a varint, bytes for other types.
    """
    position = 0
    while position < len(buffer):
        key, position = _varint(buffer, position)
        wire = key & 7
        if wire == 0:
            value, position = _varint(buffer, position)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if size is None:
            size, position = _varint(buffer, position)
        yield key >> 3, buffer[position : position + size]
        position += size


def _varint(buffer: bytes, position: int) -> tuple[int, int]:
    """Return the protobuf varint at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


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
    """A tokenizer from a tiktoken vocabulary; special tokens have the first ids, eod is `</s>`."""

    kind = "TikTokenizer"

    def __init__(
        self, path: str, *, pattern: str, vocab_size: int, num_special: int, special: Sequence[str]
    ) -> None:
        options = {"pattern": pattern, "vocab_size": vocab_size, "num_special_tokens": num_special}
        super().__init__(path, {**options, "special_tokens": list(special)})
        tiktoken = require_package("tiktoken", self.kind)
        names = _special_names(pattern, vocab_size, num_special, special)
        ids = {name: i for i, name in enumerate(names)}
        self.vocab_size = vocab_size
        self._pattern = pattern
        self._num_special = len(ids)
        self.eos, self.bos, self.pad, self.unk = (ids[x] for x in ("</s>", "<s>", "<pad>", "<unk>"))
        self._encoding: Any = tiktoken.Encoding(
            name=Path(path).parent.name,
            pat_str=PATTERNS[pattern],
            mergeable_ranks=_ranks(path, vocab_size - num_special, num_special),
            special_tokens=ids,
        )

    def tokenize(self, text: str) -> list[int]:
        return list(self._encoding.encode(text, allowed_special="all"))

    @cached_property
    def boundary(self) -> Boundary | None:
        from megatron_ext.text.tokenizers.boundaries import boundary_of_pattern

        return boundary_of_pattern(
            PATTERNS[self._pattern], sorted(self._encoding.special_tokens_set)
        )

    def token_id(self, text: str) -> int:
        try:
            return int(self._encoding.encode_single_token(text))
        except KeyError:
            return NO_TOKEN

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        return [self._encoding.encode_to_numpy(text, allowed_special="all") for text in texts]

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        first = self._num_special if skip_special_tokens else 0
        return str(self._encoding.decode([i for i in ids if i >= first]))


def _special_names(
    pattern: str, vocab_size: int, count: int, special_tokens: Sequence[str]
) -> list[str]:
    if pattern not in PATTERNS:
        raise ConfigError.about("--tiktoken-pattern", pattern, "must be v1 or v2")
    missing = [token for token in SPECIAL_TOKENS if token not in special_tokens]
    if missing:
        raise ConfigError.about(
            "--tokenizer-special-tokens",
            None,
            f"lacks {' '.join(missing)}, which TikTokenizer needs",
            f"give all of {' '.join(SPECIAL_TOKENS)}",
        )
    if len(set(special_tokens)) != len(special_tokens):
        raise ConfigError.about(
            "--tokenizer-special-tokens", None, "names a token twice", "name each once"
        )
    if not len(special_tokens) <= count < vocab_size:
        raise ConfigError.about(
            "--tiktoken-num-special-tokens",
            count,
            f"must be at least the number of special tokens ({len(special_tokens)}) and below "
            f"`--vocab-size` ({vocab_size})",
        )
    return [*special_tokens, *(f"<SPECIAL_{i}>" for i in range(len(special_tokens), count))]


def _ranks(path: str, count: int, first: int) -> dict[bytes, int]:
    """Read a tiktoken vocabulary; return the ids of its first ``count`` tokens, by their bytes.

    The first token has the id ``first``.
    """
    try:
        entries = read_json(path)
        tokens = [base64.b64decode(entry["token_bytes"]) for entry in entries[:count]]
        ordered = all(entry["rank"] == i for i, entry in enumerate(entries[:count]))
    except (UnreadableFile, ValueError, KeyError, TypeError, binascii.Error) as error:
        why = (
            error.reason
            if isinstance(error, UnreadableFile)
            else f"{type(error).__name__}: {error}"
        )
        raise DataError.about(
            "--tokenizer-model",
            path,
            f"is not a tiktoken vocabulary in JSON ({why})",
            "give a list of rank, token_bytes, token_str",
        ) from None
    if len(tokens) < count:
        raise DataError.about(
            "--tokenizer-model",
            path,
            f"holds {len(tokens)} tokens, but `--vocab-size` less "
            f"`--tiktoken-num-special-tokens` asks for {count}",
            f"use `--vocab-size {len(tokens) + first}`",
        )
    if not ordered or any(tokens[i] != bytes([i]) for i in range(min(256, count))):
        raise DataError.about(
            "--tokenizer-model",
            path,
            "must list its tokens by rank, the 256 single bytes first",
            "the file is damaged or of another kind",
        )
    return {token: first + i for i, token in enumerate(tokens)}
