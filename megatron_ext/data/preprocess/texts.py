"""Lines with texts under keys to token arrays: what a worker does with each block of a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_ext.data.preprocess.encode import Encoded, Encoder
from megatron_ext.data.preprocess.records import BadLine, parse_line
from megatron_ext.data.preprocess.sentences import Splitter

Refuse = Callable[[int, str], None]
"""Takes the number of a bad line in its part, from 0, and the reason; may raise."""
Write = Callable[[int, int, Encoded], None]
"""Takes the documents of one key and one stream."""


class BlockEncoder(Protocol):
    """What turns the lines of a block into documents."""

    def encode(self, lines: Sequence[bytes], first: int, refuse: Refuse, write: Write) -> int:
        """Encodes whole lines of a part, the first of which is number ``first``.

        Returns:
            the number of lines kept.
        """
        ...


@dataclass(frozen=True)
class TextEncoder:
    """Texts under the same keys of each line.

    Attributes:
        streams: lines go to stream `line number within the part % streams`.
    """

    keys: Sequence[str]
    streams: int
    encoder: Encoder
    splitter: Splitter | None

    def encode(self, lines: Sequence[bytes], first: int, refuse: Refuse, write: Write) -> int:
        """See `BlockEncoder.encode`."""
        kept: list[int] = []
        texts: list[list[list[str]]] = []
        for number, raw in enumerate(lines, first):
            try:
                texts.append(self._texts(raw))
                kept.append(number)
            except BadLine as bad:
                refuse(number, str(bad))
        try:
            self._encode_streams(texts, kept, write)
        except (ValueError, OverflowError):
            # The tokenizer refuses some text; only now is it worth asking which.
            good = [i for i, number in enumerate(kept) if self._accepts(texts[i], number, refuse)]
            kept, texts = [kept[i] for i in good], [texts[i] for i in good]
            self._encode_streams(texts, kept, write)
        return len(kept)

    def _texts(self, raw: bytes) -> list[list[str]]:
        texts = parse_line(raw, self.keys)
        if self.splitter is None:
            return texts
        split = self.splitter
        return [[sentence for text in document for sentence in split(text)] for document in texts]

    def _accepts(self, texts: list[list[str]], number: int, refuse: Refuse) -> bool:
        try:
            for document in texts:
                self.encoder.encodable(document)
        except BadLine as bad:
            refuse(number, str(bad))
            return False
        return True

    def _encode_streams(
        self, texts: list[list[list[str]]], numbers: list[int], write: Write
    ) -> None:
        """Encodes first and writes after, so that a refused text leaves nothing behind."""
        encoded = []
        for stream in range(self.streams):
            mine = [t for t, n in zip(texts, numbers, strict=True) if n % self.streams == stream]
            for key in range(len(self.keys)):
                batch = self.encoder.encode([document[key] for document in mine])
                encoded.append((key, stream, batch))
        for key, stream, batch in encoded:
            write(key, stream, batch)
