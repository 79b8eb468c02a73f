"""Inspects an indexed dataset: the range of its ids, a report, and its checksums.

Checksums are in `PREFIX.sha256` next to the dataset, in the format of `sha256sum -c`.
"""

import hashlib
import os
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megatron_ext import limits
from megatron_ext.data.indexed import (
    SCAN_ITEMS,
    Array,
    Index,
    IndexInfo,
    bin_path,
    byte_bar,
    check_indexed_dataset,
    idx_path,
    read_index,
    readable,
)
from megatron_ext.disk.reading import read_bytes
from megatron_ext.disk.writing import write_text
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.data.separators import (
    ending_warnings,
    first_endings,
    padding_id,
    spelled,
)
from megatron_ext.text.tokenizers.base import NO_TOKEN, Tokenizer

_BAR = 40
_SHOWN_CHARACTERS = 200
_DIGEST_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_DIGEST_BYTES = 1 << 22


def check_ids(prefix: str, ids: Array | tuple[int, int] | None, vocab_size: int) -> None:
    """Raise a DataError if an id of a dataset is outside the vocabulary.

    ``ids`` is an array of ids, or (smallest id, largest id); None if the dataset is empty.
    """
    if ids is None or len(ids) == 0:
        return
    low = int(np.min(ids))
    high = int(np.max(ids))
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{prefix}.bin holds the token id {low if low < 0 else high}, but the vocabulary has "
            f"{vocab_size} entries, from 0 on; use the tokenizer that the data was preprocessed "
            "with."
        )


def id_range(
    prefix: str | os.PathLike[str], max_tokens: int | None = None
) -> tuple[int, int] | None:
    """Return the smallest and the largest id among about the first ``max_tokens`` of a dataset.

    Read all ids if ``max_tokens`` is None; return None if the dataset has no tokens.
    """
    dtype = read_index(prefix).dtype
    low = []
    high = []
    with _opened(bin_path(prefix), "Reading ids") as (stream, bar):
        while len(piece := np.fromfile(stream, dtype, SCAN_ITEMS)):
            bar.update(piece.nbytes)
            low.append(int(piece.min()))
            high.append(int(piece.max()))
            if max_tokens is not None and len(low) * SCAN_ITEMS >= max_tokens:
                break
    return (min(low), max(high)) if low else None


@contextmanager
def _opened(path: Path, what: str) -> Iterator[tuple[BinaryIO, Any]]:
    with readable(path), open(path, "rb") as stream, byte_bar(what, os.path.getsize(path)) as bar:
        yield stream, bar


class Inspection(NamedTuple):
    """The report on a readable dataset: lines to print, and warnings."""

    lines: list[str]
    warnings: list[str]


def inspect_dataset(
    prefix: str,
    tokenizer: Tokenizer | None,
    *,
    samples: int = 3,
    seed: int = 0,
    scan: bool = True,
    is_store: bool = False,
) -> Inspection:
    """Check a dataset and describe it; raise a DataError if it is damaged.

    Args:
        tokenizer: the tokenizer of the dataset; without it, ids are not shown as text, and neither
            the vocabulary nor the ends of documents are checked.
        samples: number of random documents that the report shows.
        seed: seed of the random choice of these documents.
        scan: whether to read all ids, and warn if one is outside the tokenizer's vocabulary.
        is_store: whether the dataset is a store of conversations for fine-tuning. A chat template
            may end these with any token, so there is no warning about the ends of documents.
    """
    info = check_indexed_dataset(prefix)
    index = read_index(prefix)
    ids = id_range(prefix) if scan else None
    mean = info.num_tokens / max(info.num_documents, 1)
    lines = [
        f"dataset    {info.prefix}",
        f"documents  {info.num_documents}",
        f"sequences  {info.num_sequences}{' (with modes)' if info.multimodal else ''}",
        f"tokens     {info.num_tokens} ({info.dtype.name}), {mean:.1f} per document",
    ]
    lines += [] if ids is None else [f"ids        {ids[0]} to {ids[1]}"]
    lines += _histogram(index)
    endings = first_endings(prefix, index)
    if tokenizer is not None and endings.documents:
        count = endings.last_ids[tokenizer.eod]
        end = spelled(tokenizer, tokenizer.eod)
        lines.append(f"{count} of the first {endings.documents} documents end with {end}")
    lines += _samples(prefix, index, tokenizer, samples, seed)
    warnings = _warnings(info, index, ids, tokenizer)
    if tokenizer is not None and not is_store:
        padding = padding_id(tokenizer)
        warnings += ending_warnings(str(prefix), endings, tokenizer, padding)
    return Inspection(lines, warnings)


def document_lengths(index: Index) -> Iterator[Any]:
    """Yield the token counts of documents, in int64 arrays of up to `SCAN_ITEMS` documents."""
    documents = index.documents
    for start in range(0, len(documents) - 1, SCAN_ITEMS):
        edges = documents[start : start + SCAN_ITEMS + 1]
        lengths = index.lengths[edges[0] : edges[-1]].astype(np.int64)
        sums = np.concatenate([[0], np.cumsum(lengths)])
        yield np.diff(sums[edges - edges[0]])


def length_counts(lengths: Array) -> Array:
    """Return the number of documents in each bin of a histogram of lengths, ``[64]``.

    Bin number n > 0 counts the lengths from 2^(n-1) to 2^n - 1; bin 0 counts empty documents.
    """
    # The exponent of frexp is the number of bits, exactly; log2 would round.
    return np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=64)


def length_bin(number: int) -> tuple[int, int]:
    """Return the shortest and the longest length in bin ``number``; bins are 0, 1, 2-3, 4-7, ..."""
    return 1 << number >> 1, (1 << number) - 1


def _histogram(index: Index) -> list[str]:
    """Return the lines of a printed histogram of document lengths."""
    counts = np.zeros(64, np.int64)
    for lengths in document_lengths(index):
        counts += length_counts(lengths)
    lines = ["tokens per document"]
    for bits in np.flatnonzero(counts):
        first, last = length_bin(int(bits))
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
        first = int(index.documents[document])
        last = int(index.documents[document + 1])
        tokens = int(index.lengths[first:last].astype(np.int64).sum())
        start = int(index.offsets[first]) if first < last else 0
        with open(bin_path(prefix), "rb") as stream:
            stream.seek(start)
            ids = np.fromfile(stream, index.dtype, min(tokens, _SHOWN_CHARACTERS)).tolist()
        lines.append(f"document {document}: {last - first} sequences, {tokens} tokens")
        lines.append(f"  ids   {' '.join(map(str, ids[:16]))}{' ...' if tokens > 16 else ''}")
        if tokenizer is not None:
            valid = [i for i in ids if 0 <= i < tokenizer.vocab_size]
            text = tokenizer.detokenize(valid, skip_special_tokens=False)
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


def digest_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.sha256")


def digests_of(prefix: str | os.PathLike[str]) -> dict[str, str]:
    """Return the SHA-256 of the .bin and the .idx file, by file name.

    Raise a DataError if one is unreadable.
    """
    return {path.name: _digest(path) for path in (bin_path(prefix), idx_path(prefix))}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with _opened(path, f"Digest of {path.name}") as (stream, bar):
        while piece := stream.read(_DIGEST_BYTES):
            digest.update(piece)
            bar.update(len(piece))
    return digest.hexdigest()


def recorded_digests(prefix: str | os.PathLike[str]) -> dict[str, str] | None:
    """Return the checksums in `PREFIX.sha256` by file name; None if there is no such file.

    Raise a DataError if the checksum of the .bin or the .idx file is missing.
    """
    path = digest_path(prefix)
    if not path.exists():
        return None
    lines = read_bytes(path, limit=1 << 20).decode("utf-8", errors="replace").splitlines()
    matches = [match for line in lines if (match := _DIGEST_LINE.fullmatch(line))]
    digests = {match[2]: match[1] for match in matches}
    names = [file.name for file in (bin_path(prefix), idx_path(prefix))]
    if not set(names) <= set(digests):
        raise DataError(
            f"{path} must hold a SHA-256 for {names[0]} and {names[1]}; write it again with "
            "`--write-digest`."
        )
    return {name: digests[name] for name in names}


def verify(prefix: str | os.PathLike[str], digests: Mapping[str, str]) -> bool:
    """Compare ``digests``, from `digests_of`, with `PREFIX.sha256`.

    Return False if there is no such file, True if all agree; raise a DataError if one differs.
    """
    recorded = recorded_digests(prefix)
    for name, digest in (recorded or {}).items():
        if digests[name] != digest:
            raise DataError(
                f"{Path(prefix).with_name(name)} has the SHA-256 {digests[name]}, but "
                f"{digest_path(prefix)} records {digest}; the file was changed or damaged, so "
                "copy or make it again."
            )
    return recorded is not None


def write_digests(prefix: str | os.PathLike[str], digests: Mapping[str, str]) -> Path:
    """Write ``digests``, from `digests_of`, to `PREFIX.sha256`, and return the path of this file.

    Raise a ConfigError if it cannot be written.
    """
    path = digest_path(prefix)
    temporary = Path(f"{path}.writing.{os.getpid()}")
    try:
        write_text(temporary, "".join(f"{digest}  {name}\n" for name, digest in digests.items()))
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"`--write-digest` cannot write {path} ({limits.cause(error, path)}); make "
            "its folder writable, or leave the flag out."
        ) from None
    return path
