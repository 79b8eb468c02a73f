"""Files of encoded input parts in `<prefix>.parts/`, from which a killed run is resumed.

The files `<stem>.k<key>.s<stream>.bin`, `.len` and `.doc` hold a part's tokens, tokens per sequence
and sequences per document; `<stem>.rejected` holds refused lines. The marker `<part>.json` is
renamed into place last, so that its existence means complete files. The process id in the stem
prevents a worker that outlives its killed run from writing into files of the next run. At the end
the parts are joined to datasets by kernel copies, with cumulative sums as indices.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from megatron_ext.data.indexed_writer import append_file, narrow, publish, write_index
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.preprocess.encode import Encoded
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.options import PreprocessOptions

_FORMAT = 1
_SECONDS_FOR_DYING_WORKERS = 1.0


@dataclass(frozen=True)
class PartMarker:
    """The marker of a finished part: numbers of lines read, documents, tokens and refused lines.

    The names of the part's files begin with ``stem``; ``sizes`` in bytes detect later damage.
    """

    stem: str
    lines: int
    documents: int
    tokens: int
    rejected: int
    sizes: dict[str, int]


class PartWriter:
    """A writer of the files of one part, with a dtype for each key; `finish` writes the marker."""

    def __init__(self, folder: Path, number: int, streams: int, dtypes: Sequence[Any]) -> None:
        self._folder, self._number, self._dtypes = folder, number, dtypes
        self._stem = f"p{number:06}.{os.getpid()}"
        self._files: dict[str, BinaryIO] = {}
        for key, stream, kind in product(range(len(dtypes)), range(streams), ("bin", "len", "doc")):
            self._open(f"{self._stem}.k{key}.s{stream}.{kind}")
        self._rejected = self._open(f"{self._stem}.rejected")
        self._counts = {"lines": 0, "documents": 0, "tokens": 0, "rejected": 0}

    def _open(self, name: str) -> BinaryIO:
        self._files[name] = stream = open(self._folder / name, "wb")
        return stream

    def write(self, key: int, stream: int, encoded: Encoded) -> None:
        stem = f"{self._stem}.k{key}.s{stream}"
        self._files[f"{stem}.bin"].write(narrow(encoded.tokens, self._dtypes[key]).tobytes())
        self._files[f"{stem}.len"].write(encoded.lengths.astype("<i4").tobytes())
        self._files[f"{stem}.doc"].write(encoded.documents.astype("<i4").tobytes())
        self._counts["tokens"] += len(encoded.tokens)

    def reject(self, line: int, reason: str, raw: bytes) -> None:
        """Record a refused line; `line` is its number within the part, from 0."""
        text = raw.decode("utf-8", errors="backslashreplace")
        record = {"line": line, "reason": reason, "text": text}
        self._rejected.write(json.dumps(record).encode() + b"\n")
        self._counts["rejected"] += 1

    def count(self, lines: int, documents: int) -> None:
        self._counts["lines"] += lines
        self._counts["documents"] += documents

    def finish(self) -> None:
        """Close the files and write the marker, which says that the part is finished."""
        sizes = {}
        for name, stream in self._files.items():
            stream.close()
            sizes[name] = os.path.getsize(self._folder / name)
        done = PartMarker(stem=self._stem, sizes=sizes, **self._counts)
        temporary = self._folder / f"{self._stem}.marker"
        temporary.write_text(json.dumps(asdict(done)))
        os.replace(temporary, marker_path(self._folder, self._number))

    def abandon(self) -> None:
        for name, stream in self._files.items():
            stream.close()
            (self._folder / name).unlink(missing_ok=True)


def marker_path(folder: Path, number: int) -> Path:
    """Return the path of the JSON file that marks a part as finished."""
    return folder / f"p{number:06}.json"


def read_marker(folder: Path, number: int) -> PartMarker | None:
    """Return the marker of a part if all its files exist in full size, else None."""
    try:
        done = PartMarker(**json.loads(marker_path(folder, number).read_bytes()))
        if any(Path(name).name != name for name in (done.stem, *done.sizes)):
            return None
        whole = all(os.path.getsize(folder / name) == size for name, size in done.sizes.items())
    except (OSError, ValueError, TypeError):
        return None
    return done if whole else None


def read_rejected(folder: Path, done: PartMarker) -> Iterator[dict[str, Any]]:
    """Yield the records of one part's refused lines, numbered from 0 within the part."""
    if done.rejected:
        with open(folder / f"{done.stem}.rejected", "rb") as stream:
            for line in stream:
                yield json.loads(line)


class WorkDirectory:
    """The folder `<prefix>.parts/`, locked by one run at a time.

    It stays after a failure if a later run can read the same input again (``resumable``).

    Raises:
        ConfigError: the folder cannot be made, or holds files that no run has written.
        DataError: another run has locked it.
    """

    def __init__(self, output_prefix: str, *, resumable: bool = True) -> None:
        self.resumable = resumable
        self.folder = Path(f"{output_prefix}.parts")
        self._lock = FileLock(self.folder / "lock")
        try:
            self.folder.mkdir(exist_ok=True)
            if any(self.folder.iterdir()) and not (self.folder / "lock").exists():
                raise ConfigError(
                    f"`--output-prefix` ({output_prefix}) needs the folder {self.folder} for the "
                    "work, but it holds other files; move them, or give another prefix."
                )
            # The workers of a killed run hold the lock with it until they have ended too.
            self._lock.acquire(timeout=_SECONDS_FOR_DYING_WORKERS)
        except Timeout:
            raise DataError(
                f"Another run is writing {output_prefix} (it holds {self.folder}/lock); wait for "
                "it, or give another `--output-prefix`."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"`--output-prefix` ({output_prefix}) needs the folder {self.folder} for the work, "
                f"which cannot be made or written ({error.strerror}); mend this, or give another "
                "prefix."
            ) from None

    def __enter__(self) -> "WorkDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, _trace: object
    ) -> None:
        """Unlock the folder; remove it after success, or if there is nothing to resume."""
        keep = self.resumable and any(self.folder.glob("p[0-9]*.json"))
        if kind is None or not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()
        if isinstance(value, OSError):
            kept = "finished parts are kept" if keep else "nothing is kept"
            raise DataError(
                f"{self.folder.with_suffix('')} was not written ({value}); {kept}, so free space "
                "or mend this, and run the same command again."
            ) from value

    def resumed_parts(self, fingerprint: dict[str, Any]) -> list[Part] | None:
        """Return the parts of an earlier run with the same fingerprint, else None."""
        try:
            plan = json.loads((self.folder / "plan.json").read_bytes())
            if plan["fingerprint"] != _plain(fingerprint):
                return None
            parts = [Part(**part) for part in plan["parts"]]
            if any(os.path.getsize(part.path) < part.end for part in parts):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return parts

    def begin(self, fingerprint: dict[str, Any], parts: list[Part]) -> None:
        """Record a new run's parts, and the fingerprint by which a later run may resume them."""
        plan = {"fingerprint": _plain(fingerprint), "parts": [asdict(part) for part in parts]}
        temporary = self.folder / "plan.new"
        temporary.write_text(json.dumps(plan))
        os.replace(temporary, self.folder / "plan.json")

    def clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()

    def finished(self, count: int) -> dict[int, PartMarker]:
        """Return the markers of finished parts by number; remove the files of unfinished ones."""
        done = {i: marker for i in range(count) if (marker := read_marker(self.folder, i))}
        stems = tuple(f"{marker.stem}." for marker in done.values())
        for path in self.folder.glob("p[0-9]*.*"):
            if path.suffix != ".json" and not path.name.startswith(stems):
                path.unlink()
        return done


def _plain(fingerprint: dict[str, Any]) -> Any:
    """Return ``fingerprint`` with the format version of part files, as read back from JSON."""
    return json.loads(json.dumps({"format": _FORMAT, **fingerprint}))


@dataclass(frozen=True)
class Segment:
    """Documents [start, end) in one output stream of a part; None for both means all documents."""

    done: PartMarker
    stream: int
    start: int | None = None
    end: int | None = None


def _partitions(
    options: PreprocessOptions, folder: Path, markers: Sequence[PartMarker]
) -> list[list[Segment]]:
    """Return the segments of each partition, in order.

    Line n of the whole input goes to partition n % partitions; or, with
    ``keep_sequential_samples``, each partition has ceil(lines / partitions) consecutive lines.
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
                segments.append(Segment(done, (p - first) % count))
        partitions.append(segments)
    return partitions


def _clip(folder: Path, done: PartMarker, first: int, last: int) -> list[Segment]:
    """Return a list with the segment of a part's lines [first, last); empty if it has none."""
    first, last = max(first, 0), min(last, done.lines)
    if first >= last:
        return []
    if (first, last) == (0, done.lines):
        return [Segment(done, 0)]
    bad = np.asarray([record["line"] for record in read_rejected(folder, done)], np.int64)
    start, end = (line - int((bad < line).sum()) for line in (first, last))
    return [Segment(done, 0, start, end)]


class Dataset:
    """A `.bin/.idx` pair to write from segments of one key, first under temporary names."""

    def __init__(
        self, folder: Path, prefix: str, key: int, segments: Sequence[Segment], dtype: Any
    ) -> None:
        self._folder, self._key, self._segments, self._dtype = folder, key, segments, dtype
        final = [Path(f"{prefix}.{kind}") for kind in ("bin", "idx")]
        self.renames = [(Path(f"{path}.joining"), path) for path in final]

    def write(self) -> None:
        """Write both files under their temporary names."""
        tokens, index = (temporary for temporary, _ in self.renames)
        with open(tokens, "wb") as out:
            for segment in self._segments:
                start, end = self._span(segment, "bin")
                append_file(out, self._file(segment, "bin"), start, end)
            os.fsync(out.fileno())
        write_index(index, self._dtype, lambda: self._array("len"), lambda: self._array("doc"))

    def _file(self, segment: Segment, kind: str) -> Path:
        return self._folder / f"{segment.done.stem}.k{self._key}.s{segment.stream}.{kind}"

    def _span(self, segment: Segment, kind: str) -> tuple[int, int | None]:
        """Return start and end of a segment in its file; an end of None means the end of the file.

        Both count entries in files of the kinds "doc" and "len", and bytes in those of "bin".
        """
        start, end = segment.start, segment.end
        if start is None or end is None:
            return 0, None
        # Documents count sequences, and sequences count tokens.
        for counted in {"doc": (), "len": ("doc",), "bin": ("doc", "len")}[kind]:
            counts = np.fromfile(self._file(segment, counted), "<i4")
            ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
            start, end = int(ends[start]), int(ends[end])
        width = self._dtype.itemsize if kind == "bin" else 1
        return start * width, end * width

    def _array(self, kind: str) -> Iterator[Any]:
        for segment in self._segments:
            start, end = self._span(segment, kind)
            count = -1 if end is None else end - start
            yield np.fromfile(self._file(segment, kind), "<i4", count, offset=4 * start)


def publish_datasets(
    options: PreprocessOptions, folder: Path, markers: Sequence[PartMarker], dtypes: Sequence[Any]
) -> list[str]:
    """Write and rename all datasets; return the prefix of each key's dataset with all lines."""
    partitions = _partitions(options, folder, markers)
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
    renames = [pair for dataset in datasets for pair in dataset.renames]
    try:
        for dataset in datasets:
            dataset.write()
        publish(renames)
    finally:
        for temporary, _ in renames:
            temporary.unlink(missing_ok=True)
    return prefixes


def publish_rejected(
    options: PreprocessOptions, folder: Path, parts: Sequence[Part], markers: Sequence[PartMarker]
) -> Path | None:
    """Write `PREFIX.rejected.jsonl`: file, line (from 1), reason and text of each refused line.

    Return its path, or None without such lines; an older file is then removed.
    """
    path = Path(f"{options.output_prefix}.rejected.jsonl")
    if not any(marker.rejected for marker in markers):
        path.unlink(missing_ok=True)
        return None
    temporary = Path(f"{path}.joining")
    before = 0
    try:
        with open(temporary, "w", encoding="utf-8") as out:
            for part, marker in zip(parts, markers, strict=True):
                if part.start == 0:  # a new file, maybe the same one again
                    before = 0
                for record in read_rejected(folder, marker):
                    line = before + record["line"] + 1
                    fields = {"file": part.source, **record, "line": line}
                    out.write(json.dumps(fields, ensure_ascii=False) + "\n")
                before += marker.lines
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
