r"""Indexed datasets: the pair `<prefix>.bin` (tokens) and `<prefix>.idx` (their positions).

Layout of `.idx`, little endian: magic `MMIDIDX\0\0`, u64 version 1, u8 dtype code, u64 number of
sequences Q, u64 number of document boundaries D + 1, i32 lengths [Q] in tokens, i64 byte offsets
[Q], i64 boundaries [D + 1] in sequences (first 0, last Q), and i8 modes [Q] in multimodal sets.
`.bin` holds the tokens alone.

This module needs only numpy, so that tools can read and check datasets without torch.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_ext.disk.bus import remember_size
from megatron_ext.disk.reading import UnreadableFile, open_regular
from megatron_ext.disk.writing import why_not_writable
from megatron_ext.errors import DataError

if TYPE_CHECKING:
    from tqdm import tqdm

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
_DTYPES = "uint8 int8 int16 int32 int64 float64 float32 uint16".split()
CODE_OF_DTYPE: dict[str, int] = {name: code for code, name in enumerate(_DTYPES, 1)}
DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {c: np.dtype(n) for n, c in CODE_OF_DTYPE.items()}
SCAN_ITEMS = 1 << 20

Array = npt.NDArray[Any]


def optimal_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the token dtype that Megatron-LM chooses: uint16 below 65,500 ids, else int32."""
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the dataset's tokens, `<prefix>.bin`."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the dataset's index, `<prefix>.idx`."""
    return Path(f"{os.fspath(prefix)}.idx")


def is_address(prefix: str | os.PathLike[str]) -> bool:
    """Return whether a prefix is an address, such as ``s3://bucket/web``, and not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", os.fspath(prefix)) is not None


@dataclass(frozen=True)
class IndexInfo:
    """The header and sizes of one indexed dataset.

    ``multimodal`` says whether each sequence has a mode (see `Index`).
    """

    prefix: str
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int
    num_tokens: int
    multimodal: bool


@dataclass(frozen=True)
class Index:
    """The arrays of one `.idx` with Q sequences in D documents, memory-mapped.

    Attributes:
        lengths: i32 [Q], tokens of each sequence.
        offsets: i64 [Q], first byte of each sequence in `.bin`.
        documents: i64 [D + 1], index of each document's first sequence, then Q.
        modes: i8 [Q], mode (Megatron's number of a modality) of each sequence; None in a dataset
            that is not multimodal.
    """

    dtype: np.dtype[Any]
    lengths: Array
    offsets: Array
    documents: Array
    modes: Array | None


def byte_bar(what: str, total: int) -> tqdm[Any]:
    """Return a bar for ``total`` bytes with the label ``what``, visible on a terminal only."""
    from tqdm import tqdm

    return tqdm(
        desc=what, total=total, unit="B", unit_scale=True, delay=1.0, leave=False, disable=None
    )


def read_index(prefix: str | os.PathLike[str]) -> Index:
    """Map `<prefix>.idx` into memory.

    Raises:
        DataError: the file cannot be read, is truncated, or is not an index of version 1.
    """
    if is_address(prefix):
        raise DataError(
            f"{os.fspath(prefix)} is an address, which only pretraining with `--data-order direct` "
            "reads; give that flag, or copy the pair of files to a folder."
        )
    path = idx_path(prefix)
    with readable(path):
        return _read_index(path)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Within the context, turn an OSError into a DataError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}); check its permissions and the "
            "disk, or copy it again."
        ) from None


def _read_index(path: Path) -> Index:
    if not path.is_file():
        raise DataError(
            f"Dataset index {path} does not exist; give the path prefix without .bin/.idx, or make "
            "it with tools/preprocess_data.py."
        )
    size = path.stat().st_size
    with open(path, "rb") as stream:
        header = stream.read(HEADER_BYTES)
    if header[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} does not start with the index magic MMIDIDX, so it is not a Megatron index; "
            "make it again with tools/preprocess_data.py."
        )
    if len(header) < HEADER_BYTES:
        raise DataError(
            f"{path} is cut inside its header ({size} of at least {HEADER_BYTES} bytes); "
            "copy or make it again."
        )
    version, code, sequences, boundaries = struct.unpack("<QBQQ", header[len(MAGIC) :])
    if version != VERSION:
        raise DataError(
            f"{path} has index version {version}, but only version {VERSION} can be read; make it "
            "again with tools/preprocess_data.py."
        )
    if code not in DTYPE_OF_CODE:
        raise DataError(
            f"{path} has dtype code {code}, which must be one of 1 to 8; the file is damaged, "
            "copy or make it again."
        )
    return _map_arrays(path, size, DTYPE_OF_CODE[code], sequences, boundaries)


def _map_arrays(
    path: Path, size: int, dtype: np.dtype[Any], sequences: int, boundaries: int
) -> Index:
    plain = HEADER_BYTES + 12 * sequences + 8 * boundaries
    remember_size(path, size)
    if size not in (plain, plain + sequences) or boundaries < 1:
        raise DataError(
            f"{path} has {size} bytes, but its {sequences} sequences and {boundaries} document "
            f"boundaries need {plain} (or {plain + sequences} with modes); it is truncated or "
            "damaged, copy or make it again."
        )
    offset = HEADER_BYTES
    with open(path, "rb") as stream:
        buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def take(count: int, kind: str) -> Array:
        nonlocal offset
        array = np.frombuffer(buffer, dtype=np.dtype(kind), count=count, offset=offset)
        offset += array.nbytes
        return array

    lengths = take(sequences, "<i4")
    offsets = take(sequences, "<i8")
    documents = take(boundaries, "<i8")
    modes = take(sequences, "i1") if sequences and size == plain + sequences else None
    return Index(dtype, lengths, offsets, documents, modes)


def path_of_tokens(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of a dataset's tokens, `<prefix>.bin`; raise a DataError if it is missing."""
    data = bin_path(prefix)
    if not data.is_file():
        raise DataError(f"{data} does not exist beside its index {idx_path(prefix)}; copy both.")
    return data


def check_present(prefix: str | os.PathLike[str]) -> None:
    """Raise a DataError if a dataset's index is missing or damaged, or its tokens are missing."""
    read_index(prefix)
    path_of_tokens(prefix)


def check_indexed_dataset(prefix: str | os.PathLike[str]) -> IndexInfo:
    """Check that `.idx` and `.bin` are complete and match; return the dataset's header and sizes.

    For a billion sequences this takes seconds.

    Raises:
        DataError: a file is missing or damaged, or the two disagree; the message says how.
    """
    index = read_index(prefix)
    data = path_of_tokens(prefix)
    itemsize = index.dtype.itemsize
    tokens = _check_sequences(prefix, index)
    with readable(data), open(data, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
    remember_size(data, size)
    if size != tokens * itemsize:
        verb = "truncated" if size < tokens * itemsize else "longer than its index says"
        raise DataError(
            f"{data} is {verb}: it has {size} bytes, but its index counts {tokens} tokens of "
            f"{itemsize} bytes ({tokens * itemsize} bytes); copy or make the pair again."
        )
    _check_documents(prefix, index)
    counts = (len(index.lengths), len(index.documents) - 1, tokens)
    return IndexInfo(os.fspath(prefix), index.dtype, *counts, index.modes is not None)


def _check_sequences(prefix: str | os.PathLike[str], index: Index) -> int:
    """Check that each sequence begins where the one before ends; return the number of tokens."""
    itemsize = index.dtype.itemsize
    end = 0
    for start in range(0, len(index.lengths), SCAN_ITEMS):
        lengths = index.lengths[start : start + SCAN_ITEMS].astype(np.int64)
        if len(lengths) and lengths.min() < 0:
            bad = start + int(np.argmax(lengths < 0))
            raise DataError(
                f"{idx_path(prefix)} gives sequence {bad} a negative length "
                f"({index.lengths[bad]}); the index is damaged, make it again."
            )
        ends = end + np.cumsum(lengths * itemsize)
        wrong = ends - lengths * itemsize != index.offsets[start : start + SCAN_ITEMS]
        if wrong.any():
            fault = int(np.argmax(wrong))
            raise DataError(
                f"{idx_path(prefix)} places sequence {start + fault} at byte "
                f"{index.offsets[start + fault]}, but the lengths before it end at byte "
                f"{ends[fault] - lengths[fault] * itemsize}; the index is damaged, make it again."
            )
        end = int(ends[-1]) if len(ends) else end
    return end // itemsize


def _check_documents(prefix: str | os.PathLike[str], index: Index) -> None:
    first = int(index.documents[0])
    last = int(index.documents[-1])
    ordered = all(
        bool((np.diff(index.documents[i : i + SCAN_ITEMS + 1]) >= 0).all())
        for i in range(0, len(index.documents), SCAN_ITEMS)
    )
    if first != 0 or last != len(index.lengths) or not ordered:
        raise DataError(
            f"{idx_path(prefix)} has document boundaries from {first} to {last} that must rise "
            f"from 0 to the number of sequences ({len(index.lengths)}); the index is damaged, "
            "make it again."
        )


def _why_no_array(path: Path) -> str | None:
    """Return a clause that says why a ``.npy`` file is not an intact array of numbers.

    Return None if the array is intact. Return None for an empty file, too, which a killed run may
    leave: it holds nothing that megatron-core could unpickle.
    """
    distrust = "could run code; remove it if you do not trust where the data comes from"
    headers = {(1, 0): np.lib.format.read_array_header_1_0}
    headers[2, 0] = np.lib.format.read_array_header_2_0
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return None
            if file.read(6) != np.lib.format.MAGIC_PREFIX:
                return f"is no array of numpy, though its name says so, and {distrust}"
            file.seek(0)
            version = np.lib.format.read_magic(file)
            shape, _, dtype = headers[version](file, max_header_size=10_000)
            # A pickle of objects would follow such a header.
            if dtype.hasobject:
                return f"holds objects instead of numbers, and {distrust}"
            if file.tell() + math.prod(shape) * dtype.itemsize > size:
                return "is cut, as by a run that was killed; remove it"
    except UnreadableFile as error:
        return f"cannot be read ({error.reason}); remove it"
    # The header is a Python literal, and numpy's parser fails on malformed ones in many ways.
    except Exception as error:
        why = " ".join(str(error).split())[:80]
        return f"is no array of numpy, for its header is damaged ({why}), and {distrust}"
    return None


def check_cached_indices(prefixes: Iterable[str], data_cache_path: str | None, name: str) -> None:
    """Check the folders where megatron-core caches the sample indices of datasets.

    All datasets use the folder ``data_cache_path``; if it is None, each uses its own,
    ``<prefix>/cache/<name>_indices``, where ``name`` is the dataset's class in megatron-core. A
    ``.npy`` file that is no plain array is refused, because numpy would unpickle it, which could
    run code that came with the dataset. Rank 0 will write to a folder that has no ``.npy`` files.

    Raises:
        DataError: a ``.npy`` file is no array of numbers, a cached file is a link, or a folder
            without ``.npy`` files is not writable.
    """
    folders = [Path(prefix) / "cache" / f"{name}_indices" for prefix in prefixes]
    for folder in sorted(set(folders)) if data_cache_path is None else [Path(data_cache_path)]:
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        for path in entries:
            if path.suffix in (".npy", ".txt", ".dsc") and path.is_symlink():
                raise DataError(
                    f"{path} is a link, through which an index could overwrite another file; put "
                    "a copy there, or give another `--data-cache-path`."
                )
        files = [path for path in entries if path.suffix == ".npy"]
        for path in files:
            if (reason := _why_no_array(path)) is not None:
                raise DataError(f"{path} {reason}, or give another `--data-cache-path`.")
        reason = why_not_writable(folder)
        # A full cache may lie in a read-only folder.
        if reason is not None and not files:
            raise DataError(
                f"The indices of samples cannot be written to {folder} ({reason}); give a folder "
                "that can with `--data-cache-path`."
            )
