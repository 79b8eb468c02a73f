"""Datasets of given documents, and random documents whose likeness is known."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_ext.data.indexed_writer import IndexedWriter

Tokens = Sequence[int]


def write(prefix: Path, documents: Sequence[Tokens], dtype: str = "uint16") -> str:
    """Write a dataset; a document of 4 tokens and more has two sequences, an empty one none."""
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            first = min(len(document), 3)
            lengths = [first, len(document) - first] if len(document) > 3 else [first] * bool(first)
            writer.add_document(np.array(document, dtype=np.int64), lengths)
    return str(prefix)


def pair(random: np.random.Generator, length: int, common: int) -> tuple[Tokens, Tokens]:
    """Return two documents of random tokens that begin with the same ``common`` tokens."""
    tokens = random.integers(0, 60_000, 2 * length - common)
    return tokens[:length].tolist(), [*tokens[:common].tolist(), *tokens[length:].tolist()]


def likeness(one: Tokens, other: Tokens, size: int) -> float:
    """Return the Jaccard similarity of the sets of runs of ``size`` tokens."""
    a, b = ({tuple(d[i : i + size]) for i in range(len(d) - size + 1)} for d in (one, other))
    return len(a & b) / len(a | b)
