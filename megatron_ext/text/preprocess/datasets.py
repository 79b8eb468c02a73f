"""Joins the files of encoded parts into datasets: one dataset, partitions or shards.

The kernel copies the tokens from file to file, where it can. Cumulative sums of the stored lengths
tell where a document begins and ends.
"""

import glob
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ext.data.indexed_writer import append_file, publish, write_index
from megatron_ext.disk.writing import open_new
from megatron_ext.errors import ConfigError
from megatron_ext.text.preprocess.inputs import Part, place_of
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import PartMarker, read_rejected

_MOST_SHARDS = 99_999


@dataclass(frozen=True)
class Segment:
    """A range of the documents [start, end) in one output stream of an encoded part of the input.

    A part has one stream of documents for each partition, or a single one; ``stream`` is its index.
    If start and end are None, the range is the whole stream. ``done`` is the part's marker, which
    gives the names of its files.
    """

    done: PartMarker
    stream: int
    start: int | None = None
    end: int | None = None


def _partitions(
    options: PreprocessOptions, folder: Path, markers: Sequence[PartMarker]
) -> list[list[Segment]]:
    """Return the segments of each partition, in the order of partitions and of parts.

    Line n of the whole input goes to partition n % partitions. With ``keep_sequential_samples``
    each partition has ceil(lines / partitions) consecutive lines instead.
    """
    count = options.partitions
    if count == 1:
        return [[Segment(done, 0) for done in markers]]
    before = [0, *accumulate(done.lines for done in markers)]
    size = max(1, math.ceil(before[-1] / count))
    partitions = []
    for p in range(count):
        segments = []
        for done, first in zip(markers, before, strict=False):
            if options.keep_sequential_samples:
                segments += _clip(folder, done, p * size - first, (p + 1) * size - first)
            else:
                # Line i of the part is line `first` + i of the input, and in stream i % count.
                segments.append(Segment(done, (p - first) % count))
        partitions.append(segments)
    return partitions


def _clip(folder: Path, done: PartMarker, first: int, last: int) -> list[Segment]:
    """Return a list with the segment of the documents in a part's lines [first, last).

    Lines are numbered from 0 in the part. The range may begin before the part and end after it; if
    it has no line of the part, return []. ``done`` is the marker of the part.
    """
    first = max(first, 0)
    last = min(last, done.lines)
    if first >= last:
        return []
    if (first, last) == (0, done.lines):
        return [Segment(done, 0)]
    # Refused and blank lines have no documents, so subtract those before a line.
    bad = np.asarray([record["line"] for record in read_rejected(folder, done)], np.int64)
    start, end = (line - int((bad < line).sum()) for line in (first, last))
    return [Segment(done, 0, start, end)]


class Dataset:
    """The `.bin` and `.idx` file of a dataset, which are joined from segments of finished parts.

    ``key`` is the index of the JSON key whose texts the dataset holds. The files are written under
    temporary names; ``renames`` holds (temporary path, final path) of both.
    """

    def __init__(
        self, folder: Path, prefix: str, key: int, segments: Sequence[Segment], dtype: Any
    ) -> None:
        self._folder = folder
        self._key = key
        self._segments = segments
        self._dtype = dtype
        final = [Path(f"{prefix}.{kind}") for kind in ("bin", "idx")]
        self.renames = [(Path(f"{path}.joining"), path) for path in final]

    def write(self) -> None:
        """Write both files under their temporary names."""
        tokens, index = (temporary for temporary, _ in self.renames)
        with open_new(tokens, "wb") as out:
            for segment in self._segments:
                start, end = self._span(segment, "bin")
                append_file(out, self._file(segment, "bin"), start, end)
            os.fsync(out.fileno())
        write_index(index, self._dtype, lambda: self._array("len"), lambda: self._array("doc"))

    def _file(self, segment: Segment, kind: str) -> Path:
        return self._folder / f"{segment.done.stem}.k{self._key}.s{segment.stream}.{kind}"

    def _span(self, segment: Segment, kind: str) -> tuple[int, int | None]:
        """Return (start, end) of a segment within a file of its part.

        The file is the part's file of sequences per document (``kind`` "doc"), of tokens per
        sequence ("len") or of tokens ("bin"). Start and end are indices of entries for "doc" and
        "len", and bytes for "bin". An end of None means the end of the file.
        """
        start = segment.start
        end = segment.end
        if start is None or end is None:
            return 0, None
        # "doc" holds the number of sequences of each document, "len" the number of tokens of each
        # sequence: so convert document numbers to sequence numbers, then to token numbers.
        for counted in {"doc": (), "len": ("doc",), "bin": ("doc", "len")}[kind]:
            counts = np.fromfile(self._file(segment, counted), "<i4")
            ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
            start = int(ends[start])
            end = int(ends[end])
        width = self._dtype.itemsize if kind == "bin" else 1
        return start * width, end * width

    def _array(self, kind: str) -> Iterator[Any]:
        for segment in self._segments:
            start, end = self._span(segment, kind)
            count = -1 if end is None else end - start
            yield np.fromfile(self._file(segment, kind), "<i4", count, offset=4 * start)


def _shards(
    options: PreprocessOptions, folder: Path, markers: Sequence[PartMarker]
) -> list[list[Segment]]:
    """Return the segments of each shard; shards and segments keep the order of documents.

    A shard has at most ``shard_tokens`` tokens of texts under the first JSON key, or is one longer
    document. The shards depend on the documents only, not on the parts in which they were encoded.
    """
    limit = options.shard_tokens or 0
    shards: list[list[Segment]] = [[]]
    filled = 0
    for done in markers:
        ends = _token_ends(folder, done)
        start = 0
        while start < len(ends) - 1:
            last = int(np.searchsorted(ends, ends[start] + limit - filled, side="right")) - 1
            # If the next document does not fit, begin a new shard. An empty shard takes a document
            # of any length.
            if last <= start and filled:
                shards.append([])
                filled = 0
                continue
            last = max(last, start + 1)
            shards[-1].append(Segment(done, 0, start, last))
            filled += int(ends[last] - ends[start])
            start = last
        if len(shards) > _MOST_SHARDS:
            tokens = sum(marker.tokens for marker in markers)
            raise ConfigError(
                f"`--shard-tokens` ({limit}) makes more than {_MOST_SHARDS} shards of {tokens} "
                f"tokens; give at least {-(-2 * tokens // _MOST_SHARDS)}."
            )
    return shards


def _token_ends(folder: Path, done: PartMarker) -> npt.NDArray[np.int64]:
    """Return ``[n + 1]``: 0, then for each of a part's n documents the number of tokens to its end.

    Only tokens of texts under the first JSON key count. ``done`` is the part's marker.
    """
    counted: npt.NDArray[np.int64] | None = None
    for kind in ("len", "doc"):
        counts = np.fromfile(folder / f"{done.stem}.k0.s0.{kind}", "<i4")
        ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        counted = ends if counted is None else counted[ends]
    assert counted is not None
    return counted


def publish_datasets(
    options: PreprocessOptions, folder: Path, markers: Sequence[PartMarker], dtypes: Sequence[Any]
) -> list[str]:
    """Join the encoded parts in ``folder`` into datasets, which appear only when all are written.

    ``markers`` are the markers of all parts, in order; ``dtypes`` has one dtype of token ids for
    each JSON key. Return the path prefixes of the whole datasets, one for each key, or of all
    shards if there are shards; partitions are not returned.
    """
    sharded = options.shard_tokens is not None
    pieces = (_shards if sharded else _partitions)(options, folder, markers)
    whole = [segment for piece in pieces for segment in piece]
    datasets: list[Dataset] = []
    prefixes = []
    for i, (key, dtype) in enumerate(zip(options.json_keys, dtypes, strict=True)):
        if sharded or len(pieces) > 1:
            names = [f"{n:05}" if sharded else str(n) for n in range(len(pieces))]
            parts = [options.dataset_prefix(key, name) for name in names]
            datasets += [
                Dataset(folder, prefix, i, piece, dtype)
                for prefix, piece in zip(parts, pieces, strict=True)
            ]
            prefixes += parts if sharded else []
        if not sharded:
            prefixes.append(options.dataset_prefix(key))
            datasets.append(Dataset(folder, prefixes[-1], i, whole, dtype))
    renames = [pair for dataset in datasets for pair in dataset.renames]
    try:
        for dataset in datasets:
            dataset.write()
        publish(renames)
    finally:
        for temporary, _ in renames:
            temporary.unlink(missing_ok=True)
    if sharded:
        _remove_other_shards(options, len(pieces))
    return prefixes


def _remove_other_shards(options: PreprocessOptions, count: int) -> None:
    """Remove shards of an earlier run whose numbers are not below ``count``.

    This run has written ``count`` shards, and so has replaced the others.
    """
    for key in options.json_keys:
        before, after = options.dataset_prefix(key, "*").rsplit("*", 1)
        for kind in ("idx", "bin"):
            for name in glob.glob(f"{glob.escape(before)}[0-9]*{glob.escape(after)}.{kind}"):
                number = name[len(before) :].removesuffix(f"{after}.{kind}")
                if len(number) == 5 and number.isdigit() and int(number) >= count:
                    os.unlink(name)


def publish_rejected(
    options: PreprocessOptions, folder: Path, parts: Sequence[Part], markers: Sequence[PartMarker]
) -> Path | None:
    """Write all refused lines to `PREFIX.rejected.jsonl`, each as one JSON object.

    The object holds the line's file, its number in the file from 1, the reason and the text. Return
    the path of `PREFIX.rejected.jsonl`. If no line was refused, remove an older such file and
    return None.
    """
    path = Path(f"{options.output_prefix}.rejected.jsonl")
    if not any(marker.rejected for marker in markers):
        path.unlink(missing_ok=True)
        return None
    temporary = Path(f"{path}.joining")
    before = 0
    try:
        # The name of an input file need not be UTF-8; write its odd bytes as escapes.
        with open_new(temporary, errors="backslashreplace") as out:
            for part, marker in zip(parts, markers, strict=True):
                if part.start == 0:  # This part begins a file, perhaps one that is given twice.
                    before = 0
                for record in read_rejected(folder, marker):
                    if "reason" not in record:
                        continue
                    file, line = place_of(part, record["line"], before)
                    fields = {"file": file, **record, "line": line}
                    out.write(json.dumps(fields, ensure_ascii=False) + "\n")
                before += marker.lines
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
