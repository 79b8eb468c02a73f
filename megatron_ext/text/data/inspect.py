"""What a person wants to know of an indexed dataset before training on it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ext.data.indexed import (
    SCAN_ITEMS,
    Index,
    IndexInfo,
    bin_path,
    check_indexed_dataset,
    id_range,
    read_index,
)
from megatron_ext.text.tokenizers.base import NO_TOKEN, Tokenizer

_BAR = 40
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Inspection:
    """Lines to print, and warnings.

    Attributes:
        info: counts.
        lines: the report.
        warnings: one sentence each; the dataset can be read all the same.
    """

    info: IndexInfo
    lines: list[str]
    warnings: list[str]


def inspect_dataset(
    prefix: str, tokenizer: Tokenizer | None, *, samples: int = 3, seed: int = 0, scan: bool = True
) -> Inspection:
    """Checks a dataset and describes it.

    Args:
        tokenizer: decodes samples and bounds the ids; None leaves both out.
        samples: documents to show, drawn by `seed`.
        scan: read all ids to find the largest.

    Raises:
        DataError: the dataset is damaged.
    """
    info = check_indexed_dataset(prefix)
    index = read_index(prefix)
    ids = id_range(prefix) if scan else None
    lines = [*_counts(info, ids), *_histogram(index)]
    lines += _samples(prefix, index, tokenizer, samples, seed)
    return Inspection(info, lines, _warnings(info, index, ids, tokenizer))


def _counts(info: IndexInfo, ids: tuple[int, int] | None) -> list[str]:
    mean = info.num_tokens / max(info.num_documents, 1)
    lines = [
        f"dataset    {info.prefix}",
        f"documents  {info.num_documents}",
        f"sequences  {info.num_sequences}{' (with modes)' if info.multimodal else ''}",
        f"tokens     {info.num_tokens} ({info.dtype.name}), {mean:.1f} per document",
    ]
    return lines if ids is None else [*lines, f"ids        {ids[0]} to {ids[1]}"]


def document_lengths(index: Index) -> Iterator[Any]:
    """Tokens of each document, i64, in pieces."""
    documents = index.documents
    for start in range(0, len(documents) - 1, SCAN_ITEMS):
        edges = documents[start : start + SCAN_ITEMS + 1]
        lengths = index.lengths[edges[0] : edges[-1]].astype(np.int64)
        sums = np.concatenate([[0], np.cumsum(lengths)])
        yield np.diff(sums[edges - edges[0]])


def _histogram(index: Index) -> list[str]:
    """Documents by length, in classes that double: 0, 1, 2-3, 4-7, ..."""
    counts = np.zeros(64, np.int64)
    for lengths in document_lengths(index):
        # frexp's exponent is the number of bits: exact where log2 would round.
        counts += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=64)
    lines = ["tokens per document"]
    for bits in np.flatnonzero(counts):
        first, last = (0, 0) if bits == 0 else (1 << (bits - 1), (1 << bits) - 1)
        span = f"{first}" if first == last else f"{first}-{last}"
        bar = "#" * max(1, round(_BAR * int(counts[bits]) / int(counts.max())))
        lines.append(f"  {span:>15}  {int(counts[bits]):>12}  {bar}")
    return lines


def _samples(
    prefix: str, index: Index, tokenizer: Tokenizer | None, samples: int, seed: int
) -> list[str]:
    count = len(index.documents) - 1
    chosen = sorted(random.Random(seed).sample(range(count), min(samples, count)))
    lines = []
    for document in chosen:
        first, last = int(index.documents[document]), int(index.documents[document + 1])
        tokens = int(index.lengths[first:last].astype(np.int64).sum())
        start = int(index.offsets[first]) if first < last else 0
        with open(bin_path(prefix), "rb") as stream:
            stream.seek(start)
            ids = np.fromfile(stream, index.dtype, min(tokens, _SHOWN_CHARACTERS)).tolist()
        lines.append(f"document {document}: {last - first} sequences, {tokens} tokens")
        lines.append(f"  ids   {' '.join(map(str, ids[:16]))}{' ...' if tokens > 16 else ''}")
        if tokenizer is not None:
            known = [i for i in ids if 0 <= i < tokenizer.vocab_size]
            text = tokenizer.detokenize(known, skip_special_tokens=False)
            lines.append(f"  text  {text[:_SHOWN_CHARACTERS]!r}")
    return lines


def _warnings(
    info: IndexInfo, index: Index, ids: tuple[int, int] | None, tokenizer: Tokenizer | None
) -> list[str]:
    warnings = []
    empty = sum(int((lengths == 0).sum()) for lengths in document_lengths(index))
    if empty:
        warnings.append(f"{empty} of {info.num_documents} documents are empty.")
    if tokenizer is None:
        return warnings
    if tokenizer.pad != NO_TOKEN and tokenizer.pad in (tokenizer.eos, tokenizer.eod):
        warnings.append(
            f"The tokenizer's pad ({tokenizer.pad}) is its end of sequence: where padding is "
            "masked out of the loss, a model would never learn to stop; give it a pad of its own."
        )
    if ids is not None and (ids[1] >= tokenizer.vocab_size or ids[0] < 0):
        bad = ids[1] if ids[1] >= tokenizer.vocab_size else ids[0]
        warnings.append(
            f"Token id {bad} is beyond the tokenizer's vocabulary (0 to "
            f"{tokenizer.vocab_size - 1}): the dataset was made with another tokenizer."
        )
    return warnings
