"""The interface of tokenizers, and two tokenizers without a model file: of bytes, and of ids."""

from __future__ import annotations

import hashlib
import importlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_ext.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy.typing as npt

    from megatron_ext.text.tokenizers.boundaries import Boundary

    Ids = Sequence[int] | npt.NDArray[Any]

NO_TOKEN = -1
"""The id that stands for a special token that the tokenizer lacks; no data contain it."""

FastKind = Literal["sentencepiece", "json"]


class Tokenizer(ABC):
    """A tokenizer; it gives the same ids as megatron-core 0.16.1's with the same flags.

    The id of a missing special token is -1, as megatron-core's datasets expect.
    """

    kind: str
    """The name of this kind of tokenizer in `--tokenizer-type`."""

    def __init__(self, path: str | None, options: Mapping[str, object]) -> None:
        self.path = path
        self._options = {name: value for name, value in options.items() if value is not None}

    vocab_size: int
    """The number of ids, special tokens included, before padding for tensor parallelism."""
    eos: int
    bos: int = NO_TOKEN
    pad: int = NO_TOKEN
    unk: int = NO_TOKEN

    @property
    def eod(self) -> int:
        """Return the id that ends a document (`--append-eod`, `--eod-mask-loss`)."""
        return self.eos

    # megatron-core and NeMo read either spelling.
    eos_id = property(lambda self: self.eos)
    bos_id = property(lambda self: self.bos)
    pad_id = property(lambda self: self.pad)
    unk_id = property(lambda self: self.unk)

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Return the properties that megatron-core's datasets put into their cache keys."""
        named = OrderedDict(tokenizer_type=self.kind, path=str(self.path))
        named.update((name, str(value)) for name, value in self._options.items())
        for file in (Path(str(self.path)), Path(str(self.path)) / "tokenizer.json"):
            if file.is_file():
                named["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        return named

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text; raise a ValueError if the tokenizer cannot encode it."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids.

        With ``skip_special_tokens``, special tokens that the library recognizes are left out.
        """

    def token_id(self, text: str) -> int:
        """Return the id of the token that is spelled ``text``, or -1 if there is none."""
        return NO_TOKEN

    def notes(self) -> list[str]:
        """Return sentences on entries of the tokenizer's files that are ignored."""
        return []

    def start_ids(self) -> tuple[int, ...]:
        """Return ids, such as bos, that transformers, but not `tokenize`, puts before a text."""
        return ()

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        """Return the ids of each text, as an array or a list.

        Preprocessing runs one process per core, so an implementation should start no threads.
        """
        return [self.tokenize(text) for text in texts]

    @cached_property
    def boundary(self) -> Boundary | None:
        """Where a text may be cut so that the ids of its parts are those of the whole text.

        It is None if this is not known. See `boundaries.parts`.
        """
        return None

    def fast_source(self) -> tuple[FastKind, str] | None:
        """Return the source from which the fast library gigatoken can load this tokenizer.

        It is ("sentencepiece", path of the model), ("json", content of tokenizer.json), or None if
        gigatoken cannot replace this tokenizer.
        """
        return None

    def control_texts(self) -> tuple[str, ...]:
        """Return the texts of control tokens, such as `<|im_end|>`.

        `FastEncoder` leaves texts that contain one of them to `tokenize`.
        """
        return ()


def require_package(name: str, kind: str) -> Any:
    """Import the library ``name``, and return the module.

    Raise a ConfigError if it is not installed. ``kind`` is the type of the tokenizer that needs it,
    for the error.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError.about(
            f"--tokenizer-type {kind}",
            None,
            f"needs the package {name}, which is not installed",
            f"run `pip install {name}`",
        ) from None


def require_file(flag: str, value: str | None, what: str, kind: str) -> str:
    """Check that the flag ``flag`` gives the path of a file, and return the path.

    ``what`` describes the file in errors. Raise a ConfigError if the flag is not given, a DataError
    if the path is not a file.
    """
    if not value:
        raise ConfigError.about(
            f"--tokenizer-type {kind}", None, f"needs `{flag}` with the path of {what}"
        )
    if not Path(value).is_file():
        raise DataError.about(flag, value, "is not a file", f"give the path of {what}")
    return value


class ByteLevelTokenizer(Tokenizer):
    """A tokenizer whose ids are the bytes of a text in UTF-8.

    The ``special_tokens`` get the ids n, n + 1 and so on, where n is the argument ``vocab_size``.
    """

    kind = "ByteLevelTokenizer"
    eos, pad, unk = 0, 1, 259

    def __init__(self, vocab_size: int = 512, special_tokens: Sequence[str] = ()) -> None:
        super().__init__(None, {"vocab_size": vocab_size, "special": list(special_tokens) or None})
        self.vocab_size = vocab_size + len(special_tokens)
        self._special = {token: vocab_size + i for i, token in enumerate(special_tokens)}

    def token_id(self, text: str) -> int:
        return self._special.get(text, NO_TOKEN)

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        import numpy as np

        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        first = 2 if skip_special_tokens else 0
        return bytes(i for i in ids if first <= i < 256).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """A tokenizer for texts that are ids, separated by single spaces; eod is the largest id."""

    kind = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        super().__init__(None, {"vocab_size": vocab_size})
        self.vocab_size = vocab_size + 1
        self.eos = vocab_size

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(part) for part in text.split(" ")]
        except ValueError:
            raise ValueError(
                "the text is not integers joined by single spaces, as NullTokenizer needs"
            ) from None
        if any(not 0 <= i <= self.eos for i in ids):
            raise ValueError(f"an id is outside 0 to {self.eos} of NullTokenizer")
        return ids

    @cached_property
    def boundary(self) -> Boundary | None:
        from megatron_ext.text.tokenizers.boundaries import BETWEEN_IDS

        return BETWEEN_IDS

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(str(i) for i in ids)
