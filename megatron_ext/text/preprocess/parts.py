"""Part files in `<prefix>.parts/`, where the work on finished parts survives a kill.

A part's tokens, sequence lengths and document lengths lie in `<stem>.k<key>.s<stream>.bin`,
`.len` and `.doc`, refused lines in `<stem>.rejected`. Its marker `<part>.json` is renamed into
place last, so that a marker means whole files; the process id in the stem keeps a worker that
outlived its killed run from writing into files of the next.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from megatron_ext.data.indexed_writer import narrow
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.preprocess.encode import Encoded
from megatron_ext.text.preprocess.inputs import Part

STREAM_FILES = ("bin", "len", "doc")
_FORMAT = 1
_SECONDS_FOR_DYING_WORKERS = 1.0


@dataclass(frozen=True)
class PartMarker:
    """The marker of a finished part.

    Attributes:
        stem: start of its file names.
        lines: lines read.
        documents: lines kept.
        tokens: ids over all keys.
        rejected: number of lines set aside.
        sizes: bytes of each file, to notice one that was damaged since.
    """

    stem: str
    lines: int
    documents: int
    tokens: int
    rejected: int
    sizes: dict[str, int]


class PartWriter:
    """A writer of the files of one part; `finish` makes them count.

    Args:
        dtypes: dtype of the tokens of each key.
    """

    def __init__(self, folder: Path, number: int, streams: int, dtypes: Sequence[Any]) -> None:
        self._folder, self._number, self._dtypes = folder, number, dtypes
        self._stem = f"p{number:06}.{os.getpid()}"
        self._files: dict[str, BinaryIO] = {}
        for key in range(len(dtypes)):
            for stream in range(streams):
                for kind in STREAM_FILES:
                    self._open(f"{self._stem}.k{key}.s{stream}.{kind}")
        self._rejected = self._open(f"{self._stem}.rejected")
        self._counts = {"lines": 0, "documents": 0, "tokens": 0, "rejected": 0}

    def _open(self, name: str) -> BinaryIO:
        self._files[name] = stream = open(self._folder / name, "wb")
        return stream

    def write(self, key: int, stream: int, encoded: Encoded) -> None:
        """Append the documents of a key and a stream."""
        stem = f"{self._stem}.k{key}.s{stream}"
        self._files[f"{stem}.bin"].write(narrow(encoded.tokens, self._dtypes[key]).tobytes())
        self._files[f"{stem}.len"].write(encoded.lengths.astype("<i4").tobytes())
        self._files[f"{stem}.doc"].write(encoded.documents.astype("<i4").tobytes())
        self._counts["tokens"] += len(encoded.tokens)

    def reject(self, line: int, reason: str, raw: bytes) -> None:
        """Set a line aside; `line` counts from 0 within the part."""
        text = raw.decode("utf-8", errors="backslashreplace")
        record = {"line": line, "reason": reason, "text": text}
        self._rejected.write(json.dumps(record).encode() + b"\n")
        self._counts["rejected"] += 1

    def count(self, lines: int, documents: int) -> None:
        """Count lines that were read, and documents that were kept of them."""
        self._counts["lines"] += lines
        self._counts["documents"] += documents

    def finish(self) -> None:
        """Close the files and put the marker into place."""
        sizes = {}
        for name, stream in self._files.items():
            stream.close()
            sizes[name] = os.path.getsize(self._folder / name)
        done = PartMarker(stem=self._stem, sizes=sizes, **self._counts)
        temporary = self._folder / f"{self._stem}.marker"
        temporary.write_text(json.dumps(asdict(done)))
        os.replace(temporary, marker_path(self._folder, self._number))

    def abandon(self) -> None:
        """Remove the files of a part that failed."""
        for name, stream in self._files.items():
            stream.close()
            (self._folder / name).unlink(missing_ok=True)


def marker_path(folder: Path, number: int) -> Path:
    """Return the path of the marker of a part."""
    return folder / f"p{number:06}.json"


def read_marker(folder: Path, number: int) -> PartMarker | None:
    """Return the marker of a part whose files are all there in full size, else None."""
    try:
        done = PartMarker(**json.loads(marker_path(folder, number).read_bytes()))
        if any(Path(name).name != name for name in (done.stem, *done.sizes)):
            return None
        whole = all(os.path.getsize(folder / name) == size for name, size in done.sizes.items())
    except (OSError, ValueError, TypeError):
        return None
    return done if whole else None


def read_rejected(folder: Path, done: PartMarker) -> Iterator[dict[str, Any]]:
    """Yield the records of the lines set aside in one part, which count from 0 within it."""
    if done.rejected:
        with open(folder / f"{done.stem}.rejected", "rb") as stream:
            for line in stream:
                yield json.loads(line)


def load_array(folder: Path, done: PartMarker, key: int, stream: int, kind: str) -> Any:
    """Return the whole `.len` or `.doc` of one part, i32."""
    return np.fromfile(folder / f"{done.stem}.k{key}.s{stream}.{kind}", "<i4")


class WorkDirectory:
    """The folder `<prefix>.parts/`, held by one run at a time.

    Args:
        resumable: a later run can read the same input again.

    Raises:
        ConfigError: the folder cannot be made, or holds files that are no run's.
        DataError: another run holds it.
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

    def __enter__(self) -> WorkDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free the folder, and remove it when nothing in it is worth resuming.

        Raises:
            DataError: the file system failed, such as by a full disk.
        """
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
        """Return the parts of an earlier run that did the same with the same input, else None."""
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
        """Record a new plan, after which finished parts count."""
        plan = {"fingerprint": _plain(fingerprint), "parts": [asdict(part) for part in parts]}
        temporary = self.folder / "plan.new"
        temporary.write_text(json.dumps(plan))
        os.replace(temporary, self.folder / "plan.json")

    def clear(self) -> None:
        """Remove all but the lock."""
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()

    def finished(self, count: int) -> dict[int, PartMarker]:
        """Return the markers of the finished parts; remove files of unfinished ones."""
        done = {i: marker for i in range(count) if (marker := read_marker(self.folder, i))}
        stems = tuple(f"{marker.stem}." for marker in done.values())
        for path in self.folder.glob("p[0-9]*.*"):
            if path.suffix != ".json" and not path.name.startswith(stems):
                path.unlink()
        return done


def _plain(fingerprint: dict[str, Any]) -> Any:
    """Return a fingerprint as JSON gives it back, with the format of part files."""
    return json.loads(json.dumps({"format": _FORMAT, **fingerprint}))
