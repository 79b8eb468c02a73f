"""Records in `clips.jsonl`, for each sample of a dataset, its key, row number and shard.

The key is a hash of the sample's row in the list of clips. The file is written before clips are
encoded. Therefore a later run whose list has more rows gives old rows the same numbers, on which
random choices depend, and leaves their samples in their shards.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.disk.reading import UnreadableFile, is_count, lines_of, row_of, shortened
from megatron_ext.disk.writing import write_text
from megatron_ext.errors import DataError
from megatron_ext.video.data.clips import Clip
from megatron_ext.video.data.geometry import Bucket

FORMAT = 1
REGISTER = "clips.jsonl"
_LARGEST_FILE = 1 << 40


@dataclass(frozen=True)
class Entry:
    """One sample of a dataset, or a clip that was dropped before encoding.

    Attributes:
        key: key of the clip's row in the list, from `row_keys`. If the clip is cut into several
            windows, each of which is a sample, "." and the index of the window follow.
        number: number of the row, on which random choices depend.
        path: path of the clip, for messages.
        shard: name of the sample's shard; None if the clip was dropped before encoding.
        fps: frame rate of the sample; 0 for a picture.
    """

    key: str
    number: int
    path: str
    shard: str | None = None
    fps: float = 0.0

    @property
    def row(self) -> str:
        """Return the key of the sample's row in the list."""
        return self.key.partition(".")[0]


@dataclass
class Register:
    """The list of a dataset's samples, which is stored as ``clips.jsonl``.

    Attributes:
        options: the settings of preprocessing; with a clip and its number, they determine every
            byte of the sample.
        buckets: the buckets; their indices are the bucket numbers that samples store.
        entries: an `Entry` for each sample, in order, and for each clip that was dropped.
    """

    options: Mapping[str, Any]
    buckets: list[Bucket] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the options."""
        return _hash(self.options)

    def shards(self) -> dict[str, list[Entry]]:
        """Return the entries of each shard, by the shard's name; leave out entries without a shard.

        Both shards and entries are in the order of the dataset's samples.
        """
        shards: dict[str, list[Entry]] = {}
        for entry in self.entries:
            if entry.shard is not None:
                shards.setdefault(entry.shard, []).append(entry)
        return dict(sorted(shards.items()))

    def bucket_number(self, bucket: Bucket) -> int:
        """Return the number of a bucket; a new bucket is added and gets the next number."""
        if bucket not in self.buckets:
            self.buckets.append(bucket)
        return self.buckets.index(bucket)


def row_keys(clips: Sequence[Clip], folder: str) -> list[str]:
    """Return a unique key for each row of a list of clips, whose list file is in ``folder``.

    A key is a hash of the row's values, the clip's path relative to ``folder``, and the size and
    modification time of the clip's file. Repetitions of a row get a suffix such as "-2".
    """
    base = os.path.join(os.path.abspath(folder), "")
    counts: Counter[str] = Counter()
    keys = []
    for clip in clips:
        path = os.path.abspath(clip.path).removeprefix(base)
        member = clip.member
        stamps = stamp(clip.path) if member is None else [member.size, member.modified]
        key = _hash([path, clip.caption, clip.fps, clip.motion, *stamps])[:24]
        counts[key] += 1
        keys.append(key if counts[key] == 1 else f"{key}-{counts[key]}")
    return keys


def stamp(path: str | Path) -> list[int]:
    """Return [bytes, modification time in ns] of a file, or [] if it does not exist."""
    try:
        stat = os.stat(path)
    except OSError:
        return []
    return [stat.st_size, stat.st_mtime_ns]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_register(folder: Path, register: Register) -> None:
    """Write ``clips.jsonl`` into the folder of a dataset."""
    head = {
        "format": FORMAT,
        "options": register.options,
        "buckets": [vars(bucket) for bucket in register.buckets],
    }
    lines = [head, *(vars(entry) for entry in register.entries)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    temporary = folder / f"{REGISTER}.writing.{os.getpid()}"
    write_text(temporary, text)
    os.replace(temporary, folder / REGISTER)


def read_register(folder: Path) -> Register | None:
    """Read ``clips.jsonl``; return None if there is none, raise DataError if it is damaged."""
    path = folder / REGISTER
    if not path.exists():
        return None
    try:
        rows = map(row_of, lines_of(path, limit=_LARGEST_FILE))
        head = next(rows, None) or {}
        if head.get("format") != FORMAT or not isinstance(head.get("options"), dict):
            raise UnreadableFile(path, "its first line is not that of this format")
        buckets = [Bucket(**bucket) for bucket in head["buckets"]]
        return Register(head["options"], buckets, list(_entries(rows, path)))
    except (KeyError, TypeError) as error:
        why = f"its first line is damaged: {error!r}"
    except UnreadableFile as error:
        why = error.reason
    raise DataError(
        f"{path}, which says what the dataset holds, cannot be read ({why}); copy it again, or "
        "give another `--output`."
    )


def _entries(rows: Iterable[dict[str, Any] | None], path: Path) -> Iterable[Entry]:
    for number, row in enumerate(rows, 2):
        try:
            entry = Entry(**row)  # type: ignore[arg-type]
            sound = all(isinstance(x, str) for x in (entry.key, entry.path, entry.shard or ""))
            name = entry.shard or "shard"
            sound = sound and Path(name).name == name and isinstance(entry.fps, int | float)
        except TypeError:
            sound = False
        if not sound or not is_count(entry.number):
            raise UnreadableFile(path, f"line {number} is damaged: {shortened(row)}")
        yield entry


def refuse_other_options(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise DataError if the options of an existing dataset, ``old``, differ from ``new``."""
    before = _flat(old)
    now = _flat(new)
    differing = [
        f"`{name}` {shortened(before.get(name))} there, {shortened(now.get(name))} here"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if differing:
        raise DataError(
            f"`--output` ({folder}) holds a dataset of other options ({'; '.join(differing)}); "
            "give another folder, or remove it first."
        )


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested options by names such as ``encode.clip_seed``."""
    flat: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(options)).items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat
