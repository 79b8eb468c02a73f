"""The files of encoded parts in `<prefix>.parts/`, from which a killed run is resumed.

A plan cuts the input of a run into numbered parts. For each key of the JSON rows (number k) and
each stream of tokens (number s), the files `<stem>.k<k>.s<s>.bin`, `.len` and `.doc` hold a part's
tokens, tokens per sequence and sequences per document; `<stem>.rejected` holds refused lines. The
marker `p<part>.<plan>.json` appears last, by a rename: if it exists, the files are complete, and it
holds their stem.

A worker can outlive its killed run, on this machine or another one. Such a worker must not write
into the files of the next run. Therefore a stem is made of the part's number and random digits, and
`<plan>` in the name of a marker is the random key of the plan.
"""

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from megatron_ext import limits
from megatron_ext.data.indexed_writer import narrow
from megatron_ext.disk.reading import (
    UnreadableFile,
    is_count,
    lines_of,
    read_json_object,
    row_of,
    shortened,
)
from megatron_ext.disk.writing import lock_path, open_new, own_folder, write_text
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.preprocess.encode import Encoded
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.packed import MAX_LINE_BYTES

_FORMAT = 3
REFUSED = "refused "
"""A kind of counts in the report (see `Tally` in encode.py): the refused lines for each reason."""
SLURM_JOB = "slurm_job"
"""The name of the file that has the number of the Slurm job array encoding the parts."""
_MAX_REJECTED_BYTES = 1 << 40
_SECONDS_FOR_DYING_WORKERS = 1.0


@dataclass(frozen=True)
class PartMarker:
    """The content of the file that marks a part of the input as finished.

    Attributes:
        stem: the beginning of the names of the part's files.
        key: the key of the plan to which the part belongs.
        lines: number of lines that were read.
        documents, tokens: number of documents and tokens that were written.
        rejected: number of refused lines.
        skipped: number of blank lines at the end of the input, which are not refused.
        sizes: bytes of each file, to detect later damage.
        host: the machine that encoded the part.
        seconds: duration of the encoding.
        ended: the Unix time at which the encoding ended.
        tally: counts for the report, as ``{kind: {name: count}}``.
    """

    stem: str
    key: str
    lines: int
    documents: int
    tokens: int
    rejected: int
    skipped: int
    sizes: dict[str, int]
    host: str
    seconds: float
    ended: float
    tally: dict[str, dict[str, int]] = field(default_factory=dict)

    def is_sound(self) -> bool:
        """Tell whether all values have the right types.

        The marker is read from a file that another program may have changed.
        """
        counts = [self.lines, self.documents, self.tokens, self.rejected, self.skipped]
        texts = self.stem, self.key, self.host
        seconds = self.seconds, self.ended
        tallied = [count for named in self.tally.values() for count in named.values()]
        return (
            all(map(is_count, [*counts, *self.sizes.values(), *tallied]))
            and all(isinstance(text, str) for text in texts)
            and all(isinstance(value, int | float) for value in seconds)
        )


class PartWriter:
    """Writes the files of part ``number``; `finish` writes its marker.

    ``key`` is the key of the plan, ``streams`` the number of output streams of a part. ``dtypes``
    has one dtype of token ids for each key of the JSON rows.
    """

    def __init__(
        self, folder: Path, key: str, number: int, streams: int, dtypes: Sequence[Any]
    ) -> None:
        self._folder = folder
        self._key = key
        self._number = number
        self._dtypes = dtypes
        self._stem = f"p{number:06}.{secrets.token_hex(6)}"
        self._begun = time.monotonic()
        self._files: dict[str, BinaryIO] = {}
        for k, stream, kind in product(range(len(dtypes)), range(streams), ("bin", "len", "doc")):
            self._open(f"{self._stem}.k{k}.s{stream}.{kind}")
        self._rejected = self._open(f"{self._stem}.rejected")
        self._counts = dict.fromkeys(("lines", "documents", "tokens", "rejected", "skipped"), 0)
        self._tally: dict[str, dict[str, int]] = {}

    def _open(self, name: str) -> BinaryIO:
        self._files[name] = stream = open_new(self._folder / name, "wb")
        return stream

    def write(self, key: int, stream: int, encoded: Encoded) -> None:
        stem = f"{self._stem}.k{key}.s{stream}"
        self._files[f"{stem}.bin"].write(narrow(encoded.tokens, self._dtypes[key]).tobytes())
        self._files[f"{stem}.len"].write(encoded.lengths.astype("<i4").tobytes())
        self._files[f"{stem}.doc"].write(encoded.documents.astype("<i4").tobytes())
        self._counts["tokens"] += len(encoded.tokens)

    def reject(self, line: int, reason: str, raw: bytes) -> None:
        """Record a refused line; ``line`` is its number within the part, from 0."""
        text = raw.decode("utf-8", errors="backslashreplace")
        record = {"line": line, "reason": reason, "text": text}
        self._rejected.write(json.dumps(record).encode() + b"\n")
        self._counts["rejected"] += 1
        self.tally({REFUSED: {reason.partition(" (")[0]: 1}})

    def skip(self, line: int) -> None:
        """Record a blank line that is skipped; ``line`` is its number within the part, from 0."""
        self._rejected.write(json.dumps({"line": line}).encode() + b"\n")
        self._counts["skipped"] += 1

    def count(self, lines: int, documents: int) -> None:
        self._counts["lines"] += lines
        self._counts["documents"] += documents

    def tally(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Add ``counts``, as ``{kind: {name: count}}``, to the part's counts for the report."""
        for kind, named in counts.items():
            total = self._tally.setdefault(kind, {})
            for name, count in named.items():
                total[name] = total.get(name, 0) + count

    def finish(self) -> None:
        """Close the files, and write the marker that tells that the part is finished."""
        sizes = {}
        for name, stream in self._files.items():
            stream.close()
            sizes[name] = os.path.getsize(self._folder / name)
        done = PartMarker(
            stem=self._stem,
            key=self._key,
            sizes=sizes,
            host=socket.gethostname(),
            seconds=time.monotonic() - self._begun,
            ended=time.time(),
            tally=self._tally,
            **self._counts,
        )
        path = marker_path(self._folder, self._key, self._number)
        replace_file(path, json.dumps(asdict(done)))

    def abandon(self) -> None:
        for name, stream in self._files.items():
            stream.close()
            (self._folder / name).unlink(missing_ok=True)


def marker_path(folder: Path, key: str, number: int) -> Path:
    """Return the path of the file that marks part ``number`` of the plan ``key`` as finished."""
    return folder / f"p{number:06}.{key}.json"


def read_marker(folder: Path, key: str, number: int) -> PartMarker | None:
    """Return the marker of part ``number`` of the plan ``key``.

    Return None if there is no valid marker, or if a file of the part is missing or has another size
    than the marker says.
    """
    try:
        done = PartMarker(**read_json_object(marker_path(folder, key, number)))
        if not done.is_sound() or any(Path(n).name != n for n in (done.stem, *done.sizes)):
            return None
        whole = all(os.path.getsize(folder / name) == size for name, size in done.sizes.items())
    except (OSError, ValueError, TypeError, AttributeError, UnreadableFile):
        return None
    return done if whole and done.key == key else None


def replace_file(path: Path, text: str) -> None:
    """Write a small file atomically: a reader sees the old content or the new content."""
    temporary = path.with_suffix(f".{secrets.token_hex(6)}")
    write_text(temporary, text)
    os.replace(temporary, path)


@dataclass(frozen=True)
class Failure:
    """An error that ended a task, and that would occur again if the task were repeated.

    Attributes:
        kind: "inexact" if gigatoken gave other ids than the tokenizer (an InexactEngine), "refused"
            if the flags or the input are bad (a ConfigError or DataError).
        messages: the messages of the error, at least one.
        key: the key of the `Plan` to which the task belongs.
    """

    kind: str
    messages: list[str]
    key: str


def write_failure(folder: Path, failure: Failure) -> None:
    replace_file(folder / f"failed.{secrets.token_hex(6)}.json", json.dumps(asdict(failure)))


def failure_paths(folder: Path) -> list[Path]:
    """Return the files in a work directory that hold the errors of tasks."""
    return sorted(folder.glob("failed.*.json"))


def failure_of(path: Path) -> Failure:
    """Return the error in a file that a failed task has written.

    Raise an UnreadableFile if the file is damaged.
    """
    content = read_json_object(path)
    kind, key, messages = (content.get(name) for name in ("kind", "key", "messages"))
    if not isinstance(messages, list) or not messages:
        raise UnreadableFile(path, "it holds no messages")
    return Failure(str(kind), [str(message) for message in messages], str(key))


def read_rejected(folder: Path, done: PartMarker) -> Iterator[dict[str, Any]]:
    """Yield the records of a part's refused and blank lines.

    A record is a mapping of ``line``, the number from 0 in the part, and for a refused line also of
    ``reason`` and ``text``.
    """
    if done.rejected or done.skipped:
        # A record holds a whole line of the input, and escapes make it longer.
        path = folder / f"{done.stem}.rejected"
        limit = 7 * MAX_LINE_BYTES
        for line in lines_of(path, line_bytes=limit, limit=_MAX_REJECTED_BYTES):
            record = row_of(line)
            fits = record is not None and is_count(record.get("line"))
            if record is None or not fits:
                raise UnreadableFile(path, "it holds a line that is no record of a refused line")
            yield record


@dataclass(frozen=True)
class Plan:
    """The parts of a run, and the fingerprint of the run's input and settings.

    The random ``key`` distinguishes markers of this plan from those of an earlier plan, whose
    workers may still be running on other machines.
    """

    key: str
    fingerprint: dict[str, Any]
    parts: list[Part]


class WorkDirectory:
    """The folder `<prefix>.parts/`, which one run at a time locks.

    The folder is removed after success. After a failure it is kept only if ``resumable``, which
    tells whether a later run can read the same input again. If the attribute ``keep`` is set to
    True, the folder is always kept, for processes that continue the work.

    Raises:
        ConfigError: the folder cannot be made, or holds files that no run has written.
        DataError: another run has locked it.
    """

    def __init__(self, output_prefix: str, *, resumable: bool = True) -> None:
        self.resumable = resumable
        self.keep = False
        self._plan = Plan("", {}, [])
        self.folder = Path(f"{output_prefix}.parts")
        self._lock = FileLock(self.folder / "lock")
        try:
            own_folder(self.folder)
            if any(self.folder.iterdir()) and not (self.folder / "lock").exists():
                raise ConfigError(
                    f"`--output-prefix` ({output_prefix}) needs the folder {self.folder} for the "
                    "work, but it holds other files; move them, or give another prefix."
                )
            lock_path(self._lock.lock_file)
            # Workers inherit the lock from their run. If that was killed, they hold the lock until
            # they end, shortly after.
            self._lock.acquire(timeout=_SECONDS_FOR_DYING_WORKERS)
        except Timeout:
            raise DataError(
                f"Another run is writing {output_prefix} (it holds {self.folder}/lock); wait for "
                "it, or give another `--output-prefix`."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"`--output-prefix` ({output_prefix}) needs the folder {self.folder} for the work, "
                f"which cannot be made or written ({limits.cause(error, self.folder)}); mend "
                "this, or give another prefix."
            ) from None

    def __enter__(self) -> "WorkDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, _trace: object
    ) -> None:
        """Unlock the folder; remove it after success, or if no later run could resume from it.

        Turn an OSError that ended the ``with`` block into a DataError.
        """
        begun = any(any(self.folder.glob(names)) for names in ("p[0-9]*.json", "*.log"))
        keep = self.keep or (kind is not None and self.resumable and begun)
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()
        if isinstance(value, OSError):
            kept = "finished parts are kept" if keep else "nothing is kept"
            raise DataError(
                f"{self.folder.with_suffix('')} was not written ({value}); {kept}, so free space "
                "or mend this, and run the same command again."
            ) from value

    def resumed_parts(self, fingerprint: dict[str, Any]) -> list[Part] | None:
        """Adopt the plan of an earlier run with the same fingerprint; return the plan's parts.

        Return None if there is no such plan, or if its input files are gone.
        """
        try:
            plan = read_plan(self.folder)
            same = plan.fingerprint == _plain(fingerprint)
            if not same or not all(part.is_there() for part in plan.parts):
                return None
        except (OSError, UnreadableFile):
            return None
        self._plan = plan
        return plan.parts

    @property
    def key(self) -> str:
        """Return the random key of the current plan, which the names of its markers contain."""
        return self._plan.key

    def begin(self, fingerprint: dict[str, Any], parts: list[Part]) -> None:
        """Write the plan of a new run; a later run with the same fingerprint can resume it."""
        self._plan = Plan(secrets.token_hex(6), _plain(fingerprint), parts)
        replace_file(self.folder / "plan.json", json.dumps(asdict(self._plan)))

    def restart(self) -> None:
        """Remove all encoded parts, and give the same plan a new key.

        Workers that still run may finish parts of the old key, but these parts are ignored.
        """
        for path in self.folder.glob("p[0-9]*.*"):
            path.unlink()
        self.begin(self._plan.fingerprint, self._plan.parts)

    def clear(self) -> None:
        """Remove the files of an earlier run, except the lock and the file with its Slurm job."""
        for path in self.folder.iterdir():
            if path.name not in ("lock", SLURM_JOB):
                path.unlink()

    def finished(self, count: int) -> dict[int, PartMarker]:
        """Return the markers of finished parts, by number of the part.

        The files of unfinished parts are removed. ``count`` is the number of all parts.
        """
        done = {
            i: marker for i in range(count) if (marker := read_marker(self.folder, self.key, i))
        }
        stems = tuple(f"{marker.stem}." for marker in done.values())
        for path in self.folder.glob("p[0-9]*.*"):
            if path.suffix != ".json" and not path.name.startswith(stems):
                path.unlink()
        return done


def read_plan(folder: Path) -> Plan:
    """Read the plan of the run in a work directory.

    Raise an UnreadableFile if the plan's file is missing or damaged.
    """
    path = folder / "plan.json"
    content = read_json_object(path)
    try:
        parts = [Part(**part) for part in content["parts"]]
        plan = Plan(str(content["key"]), dict(content["fingerprint"]), parts)
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableFile(path, f"it is no plan: {error!r}") from None
    for part in parts:
        texts = part.path, part.source, part.packing, *(part.columns or ())
        counts = part.start, part.end, part.num_bytes
        if not all(isinstance(x, str) for x in texts) or not all(map(is_count, counts)):
            raise UnreadableFile(path, f"it is no plan: its part {shortened(part)} is damaged")
    return plan


def _plain(fingerprint: dict[str, Any]) -> Any:
    """Add the format version to a fingerprint; return it as it is after writing and reading JSON.

    So it can be compared with a fingerprint that was read from a file.
    """
    return json.loads(json.dumps({"format": _FORMAT, **fingerprint}))
