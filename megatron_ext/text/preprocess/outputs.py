"""Finished parts to published datasets: the kernel joins bytes, running sums make the indices."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.data.indexed_writer import append_file, publish, write_index
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import PartMarker, load_array, read_rejected

_ITEMS = 1 << 20


@dataclass(frozen=True)
class Segment:
    """Documents [start, end) of one stream of one part; all of them where both are None."""

    done: PartMarker
    stream: int
    start: int | None = None
    end: int | None = None


def first_lines(parts: Sequence[Part], done: Mapping[int, PartMarker]) -> list[int]:
    """Return, for each part, the number of lines before it in all the input."""
    counts = [done[i].lines for i in range(len(parts))]
    return [0, *np.cumsum(counts, dtype=np.int64).tolist()][: len(parts)]


def segments_of_partitions(
    options: PreprocessOptions, folder: Path, parts: Sequence[Part], done: Mapping[int, PartMarker]
) -> list[list[Segment]]:
    """Return the segments of each partition, in order.

    Round-robin: line n of all the input goes to partition n % partitions. Sequential: blocks of
    ceil(lines / partitions) lines.
    """
    count = options.partitions
    if count == 1:
        return [[Segment(done[i], 0) for i in range(len(parts))]]
    before = first_lines(parts, done)
    if not options.keep_sequential_samples:
        return [
            [Segment(done[i], (p - before[i]) % count) for i in range(len(parts))]
            for p in range(count)
        ]
    total = sum(done[i].lines for i in range(len(parts)))
    size = max(1, math.ceil(total / count))
    return [
        [
            segment
            for i in range(len(parts))
            if (segment := _clip(folder, done[i], p * size - before[i], (p + 1) * size - before[i]))
        ]
        for p in range(count)
    ]


def _clip(folder: Path, done: PartMarker, first: int, last: int) -> Segment | None:
    """Return the documents of lines [first, last) of a part; the lines may reach beyond it."""
    first, last = max(first, 0), min(last, done.lines)
    if first >= last:
        return None
    if (first, last) == (0, done.lines):
        return Segment(done, 0)
    bad = np.asarray([record["line"] for record in read_rejected(folder, done)], np.int64)
    start, end = (line - int((bad < line).sum()) for line in (first, last))
    return Segment(done, 0, start, end)


class Dataset:
    """One `.bin/.idx` to write: the segments of one key, under temporary names."""

    def __init__(
        self, folder: Path, prefix: str, key: int, segments: Sequence[Segment], dtype: Any
    ) -> None:
        self._folder, self._key, self._segments, self._dtype = folder, key, segments, dtype
        self._final = [Path(f"{prefix}.{kind}") for kind in ("bin", "idx")]
        self._temporary = [Path(f"{path}.joining") for path in self._final]

    @property
    def renames(self) -> list[tuple[Path, Path]]:
        """Return the temporary and the final path of each file."""
        return list(zip(self._temporary, self._final, strict=True))

    def write(self) -> None:
        """Write both files; a failure leaves nothing behind."""
        try:
            with open(self._temporary[0], "wb") as out:
                for segment in self._segments:
                    start, end = self._bytes(segment)
                    append_file(out, self._file(segment, "bin"), start, end)
                os.fsync(out.fileno())
            write_index(
                self._temporary[1],
                self._dtype,
                lambda: self._array("len"),
                lambda: self._array("doc"),
            )
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the temporary files."""
        for path in self._temporary:
            path.unlink(missing_ok=True)

    def _file(self, segment: Segment, kind: str) -> Path:
        return self._folder / f"{segment.done.stem}.k{self._key}.s{segment.stream}.{kind}"

    def _sequences(self, segment: Segment) -> tuple[int, int]:
        counts = load_array(self._folder, segment.done, self._key, segment.stream, "doc")
        ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        return int(ends[segment.start]), int(ends[segment.end])

    def _bytes(self, segment: Segment) -> tuple[int, int | None]:
        if segment.start is None:
            return 0, None
        first, last = self._sequences(segment)
        lengths = load_array(self._folder, segment.done, self._key, segment.stream, "len")
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) * self._dtype.itemsize
        return int(ends[first]), int(ends[last])

    def _array(self, kind: str) -> Iterator[Any]:
        for segment in self._segments:
            start, end = 0, -1
            if segment.start is not None and segment.end is not None:
                whole = kind == "doc"
                start, end = (segment.start, segment.end) if whole else self._sequences(segment)
            with open(self._file(segment, kind), "rb") as stream:
                stream.seek(4 * start)
                left = end - start if end >= 0 else -1
                while left != 0:
                    piece = np.fromfile(stream, "<i4", min(left, _ITEMS) if left > 0 else _ITEMS)
                    if not len(piece):
                        break
                    left -= len(piece) if left > 0 else 0
                    yield piece


def publish_datasets(
    options: PreprocessOptions,
    folder: Path,
    parts: Sequence[Part],
    done: Mapping[int, PartMarker],
    dtypes: Sequence[Any],
) -> list[str]:
    """Write and rename all datasets; return the prefixes of the merged ones."""
    partitions = segments_of_partitions(options, folder, parts, done)
    datasets: list[Dataset] = []
    prefixes = []
    for i, (key, dtype) in enumerate(zip(options.json_keys, dtypes, strict=True)):
        if options.partitions > 1:
            for p, segments in enumerate(partitions):
                prefix = options.dataset_prefix(key, p)
                datasets.append(Dataset(folder, prefix, i, segments, dtype))
        prefixes.append(options.dataset_prefix(key))
        merged = [segment for segments in partitions for segment in segments]
        datasets.append(Dataset(folder, prefixes[-1], i, merged, dtype))
    try:
        for dataset in datasets:
            dataset.write()
    except BaseException:
        for dataset in datasets:
            dataset.discard()
        raise
    publish([pair for dataset in datasets for pair in dataset.renames])
    return prefixes


def publish_rejected(
    options: PreprocessOptions, folder: Path, parts: Sequence[Part], done: Mapping[int, PartMarker]
) -> Path | None:
    """Write file, line (from 1), reason and text of each bad line to `<prefix>.rejected.jsonl`.

    Without a bad line, remove an older file and return None.
    """
    path = Path(f"{options.output_prefix}.rejected.jsonl")
    if not any(marker.rejected for marker in done.values()):
        path.unlink(missing_ok=True)
        return None
    temporary = Path(f"{path}.joining")
    before = 0
    try:
        with open(temporary, "w", encoding="utf-8") as out:
            for i, part in enumerate(parts):
                if part.start == 0:  # a new file, maybe the same one again
                    before = 0
                for record in read_rejected(folder, done[i]):
                    line = before + record["line"] + 1
                    fields = {"file": part.source, **record, "line": line}
                    out.write(json.dumps(fields, ensure_ascii=False) + "\n")
                before += done[i].lines
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
