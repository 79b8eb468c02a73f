"""Writes and joins indexed datasets without holding their tokens in memory.

Files are written under temporary names and renamed when they are complete.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_ext.data import indexed
from megatron_ext.data.indexed import Array, bin_path, idx_path
from megatron_ext.disk.writing import open_new
from megatron_ext.errors import DataError

_COPY_BYTES = 1 << 26

ArrayPieces = Callable[[], Iterable[Array]]


def write_index(
    path: str | os.PathLike[str],
    dtype: np.dtype[Any],
    lengths: ArrayPieces,
    document_lengths: ArrayPieces,
    modes: ArrayPieces | None = None,
    *,
    durable: bool = True,
) -> None:
    """Write one `.idx` in chunks, so that memory does not grow with the dataset.

    The arrays ``lengths``, ``document_lengths`` and ``modes`` are given as functions without
    arguments; each call returns an iterable over the chunks of the whole array.

    Args:
        dtype: dtype of the tokens in `.bin`.
        lengths: number of tokens of each sequence.
        document_lengths: number of sequences of each document.
        modes: mode of each sequence (see `Index`); None if the dataset is not multimodal.
        durable: whether to wait until the file would survive a power loss.
    """
    code = indexed.CODE_OF_DTYPE[dtype.name]
    sequences = sum(len(piece) for piece in lengths())
    documents = sum(len(piece) for piece in document_lengths())
    with open_new(path, "wb") as stream:
        stream.write(
            indexed.MAGIC + struct.pack("<QBQQ", indexed.VERSION, code, sequences, documents + 1)
        )
        for piece in lengths():
            stream.write(piece.astype("<i4", copy=False).tobytes())
        for piece in _running(lengths(), dtype.itemsize, inclusive=False):
            stream.write(piece.tobytes())
        stream.write(np.zeros(1, "<i8").tobytes())
        for piece in _running(document_lengths(), 1, inclusive=True):
            stream.write(piece.tobytes())
        for piece in modes() if modes is not None else ():
            stream.write(piece.astype("i1", copy=False).tobytes())
        stream.flush()
        if durable:
            os.fsync(stream.fileno())


def _running(pieces: Iterable[Array], scale: int, *, inclusive: bool) -> Iterator[Array]:
    """Yield the running sums of ``scale`` times the values, one int64 array per array given.

    The sums run on from array to array. With ``inclusive``, a sum includes the value at its own
    index; otherwise only the values before it.
    """
    total = 0
    for piece in pieces:
        scaled = piece.astype("<i8") * scale
        sums = np.cumsum(scaled) + total
        if len(sums):
            total = int(sums[-1])
        yield (sums if inclusive else sums - scaled).astype("<i8", copy=False)


def append_file(
    out: BinaryIO,
    source: Path,
    start: int = 0,
    end: int | None = None,
    *,
    advance: Callable[[int], object] = int,
) -> None:
    """Append the bytes ``start`` to ``end`` - 1 of a file (None: all to its end) to ``out``.

    The kernel copies them if it can. ``advance`` is called after each chunk with the number of
    bytes in the chunk.

    Raises:
        DataError: the source ended early.
    """
    out.flush()
    with open(source, "rb", buffering=0) as stream:
        end = os.fstat(stream.fileno()).st_size if end is None else end
        position = start
        left = end - start
        while left > 0:
            done = _kernel_copy(stream.fileno(), out.fileno(), position, min(left, _COPY_BYTES))
            if done == 0:
                raise DataError(
                    f"{source} ended {left} bytes early while it was joined; run again."
                )
            position = position + done
            left = left - done
            advance(done)


def _kernel_copy(source: int, target: int, position: int, count: int) -> int:
    try:
        return int(os.copy_file_range(source, target, count, offset_src=position))
    except (OSError, AttributeError):
        pass  # the kernel refuses these file systems: try sendfile or plain reads
    try:
        return os.sendfile(target, source, position, count)
    except OSError:
        data = os.pread(source, min(count, 1 << 22), position)
        return os.write(target, data)


def publish(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Rename finished temporary files to their final names, all `.idx` files last.

    ``pairs`` has the (temporary path, final path) of each file. An old `.idx` is removed before its
    `.bin` is replaced, so that an old index is never paired with new tokens.

    Raises:
        DataError: a final path is an existing folder; no file is changed then.
    """
    for _, final in pairs:
        if final.is_dir():
            raise DataError(f"{final} is a folder, but a dataset must go there; move it away.")
    ordered = sorted(pairs, key=lambda pair: pair[1].suffix == ".idx")
    for _, final in ordered:
        if final.suffix == ".idx":
            final.unlink(missing_ok=True)
    for temporary, final in ordered:
        os.replace(temporary, final)


def merge_indexed(
    prefixes: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    *,
    multimodal: bool = False,
) -> indexed.IndexInfo:
    """Join datasets in the given order into ``<output_prefix>.bin`` and ``.idx``.

    Return the header and sizes of the new dataset. ``multimodal`` tells whether all inputs have a
    mode for each sequence (see `Index`), and so will the output.

    Raises:
        DataError: there is no input, an input is damaged, dtypes differ, an input contradicts
            ``multimodal``, or the output cannot be written.
    """
    if not prefixes:
        raise DataError(
            f"There is nothing to merge into {os.fspath(output_prefix)}; give datasets."
        )
    infos = [indexed.check_indexed_dataset(prefix) for prefix in prefixes]
    first = infos[0]
    for info in infos:
        if info.dtype != first.dtype:
            raise DataError(
                f"{info.prefix} holds {info.dtype.name} tokens, but {first.prefix} holds "
                f"{first.dtype.name}; merge only datasets made with the same vocabulary."
            )
        if multimodal != info.multimodal and info.num_sequences:
            has, flag = ("no", "without") if multimodal else ("a", "with")
            raise DataError(
                f"{info.prefix} stores {has} mode per sequence; merge it {flag} --multimodal."
            )
    indices = [indexed.read_index(prefix) for prefix in prefixes]
    temporary = Path(f"{os.fspath(output_prefix)}.merging.{os.getpid()}")
    try:
        total = sum(info.num_tokens * info.dtype.itemsize for info in infos)
        with (
            open_new(bin_path(temporary), "wb", buffering=0) as out,
            indexed.byte_bar("Merging", total) as bar,
        ):
            for prefix in prefixes:
                append_file(out, bin_path(prefix), advance=bar.update)
            os.fsync(out.fileno())
        modes = [index.modes for index in indices if index.modes is not None]
        write_index(
            idx_path(temporary),
            first.dtype,
            lambda: _pieces(index.lengths for index in indices),
            # Neighbouring chunks share a boundary, so that no difference between boundaries is
            # missing.
            lambda: map(np.diff, _pieces((i.documents for i in indices), shared=1)),
            (lambda: _pieces(modes)) if multimodal else None,
        )
        publish([(f(temporary), f(output_prefix)) for f in (bin_path, idx_path)])
    except OSError as error:
        raise DataError(
            f"The merged dataset {os.fspath(output_prefix)} was not written ({error}); free space "
            "or mend this, and merge again."
        ) from error
    finally:
        for leftover in (bin_path(temporary), idx_path(temporary)):
            leftover.unlink(missing_ok=True)
    return indexed.check_indexed_dataset(output_prefix)


def _pieces(arrays: Iterable[Array], shared: int = 0) -> Iterator[Array]:
    """Yield each array in chunks; successive chunks of an array share ``shared`` elements."""
    for array in arrays:
        for start in range(0, len(array) - shared, indexed.SCAN_ITEMS):
            yield array[start : start + indexed.SCAN_ITEMS + shared]


class IndexedWriter:
    """A context manager that writes one dataset, document by document, under temporary names.

    Leaving the block renames the files to `<prefix>.bin` and `.idx`; an exception removes them.

    Args:
        dtype: dtype of the tokens in `.bin`.
        multimodal: whether to write a mode for each sequence (see `Index`).
        durable: whether to wait, before renaming, until the files would survive a power loss.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: np.dtype[Any],
        *,
        multimodal: bool = False,
        durable: bool = True,
    ) -> None:
        self._prefix = Path(prefix)
        self._temporary = Path(f"{os.fspath(prefix)}.writing.{os.getpid()}")
        self._dtype = dtype
        self._multimodal = multimodal
        self._durable = durable
        self._lengths = list[int]()
        self._documents = list[int]()
        self._modes = list[int]()
        self._bin = open_new(bin_path(self._temporary), "wb")

    def __enter__(self) -> IndexedWriter:
        return self

    def add_document(
        self, tokens: Array, lengths: Sequence[int], modes: Sequence[int] | None = None
    ) -> None:
        """Append one document.

        Args:
            tokens: [sum(lengths)] ids.
            lengths: number of tokens of each sequence; empty for an empty document.
            modes: mode of each sequence, used in a multimodal dataset only; None means 0.

        Raises:
            DataError: the lengths do not add up to the tokens, the modes do not match the lengths,
                or an id does not fit the dtype.
        """
        if sum(lengths) != tokens.size or (modes is not None and len(modes) != len(lengths)):
            raise DataError(
                f"A document of {tokens.size} tokens was given lengths {list(lengths)} and modes "
                f"{modes}; the lengths must add up to the tokens, with one mode for each."
            )
        self._bin.write(narrow(tokens, self._dtype).tobytes())
        self._lengths.extend(lengths)
        self._documents.append(len(lengths))
        if self._multimodal:
            self._modes.extend(modes if modes is not None else [0] * len(lengths))

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        self._bin.flush()
        if self._durable:
            os.fsync(self._bin.fileno())
        self._bin.close()
        if kind is not None:
            bin_path(self._temporary).unlink()
            return
        write_index(
            idx_path(self._temporary),
            self._dtype,
            lambda: [np.asarray(self._lengths, np.int32)],
            lambda: [np.asarray(self._documents, np.int64)],
            (lambda: [np.asarray(self._modes, np.int8)]) if self._multimodal else None,
            durable=self._durable,
        )
        publish([(f(self._temporary), f(self._prefix)) for f in (bin_path, idx_path)])


def narrow(ids: Array, dtype: np.dtype[Any]) -> Array:
    """Cast ids to ``dtype``.

    Raises:
        DataError: an id does not fit (numpy would silently wrap it).
    """
    if ids.size and np.issubdtype(dtype, np.integer) and ids.dtype != dtype:
        low = int(ids.min())
        high = int(ids.max())
        bounds = np.iinfo(dtype)
        bad = low if low < bounds.min else high
        if not bounds.min <= bad <= bounds.max:
            raise DataError(
                f"Token id {bad} does not fit the dataset's {dtype.name} "
                f"({bounds.min} to {bounds.max}); ids go beyond the vocabulary size, check "
                "--vocab-size."
            )
    return ids.astype(dtype, copy=False)
