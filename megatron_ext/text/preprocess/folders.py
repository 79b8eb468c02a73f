"""Reads folders as inputs: folders of texts, and Hugging Face datasets that were saved to disk.

In a folder of texts each file is a document. All files below the folder are read in the order of
their paths, except hidden files, hidden folders and links to folders. The paths are written to a
list in the work directory, and the list is cut into parts.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from megatron_ext.disk.reading import UnreadableFile, read_bytes, read_json_object
from megatron_ext.disk.writing import open_new
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.preprocess.packed import BLOCK_BYTES, MAX_LINE_BYTES

_NO_TEXTS = frozenset(
    ".arrow .bz2 .feather .gz .jsonl .parquet .tar .tgz .warc .xz .zip .zst".split()
)
"""Suffixes of files that hold many documents or none, and so are refused in a folder of texts."""


def files_of(folder: str) -> list[str]:
    """Return the input files of a folder.

    They are the Arrow files of a dataset that `save_to_disk` wrote, or the folder itself if it
    holds texts. Raise a DataError for any other folder.
    """
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        example = os.path.join(folder, names[0] if names else "train")
        raise DataError(
            f"`--input` ({folder}) holds several datasets ({', '.join(names)}); give the folder of "
            f"one or more, such as {example}."
        )
    state = os.path.join(folder, "state.json")
    if os.path.isfile(state):
        return _saved_files(folder, state)
    first = next(texts_below(folder), None)
    if first is None:
        raise DataError(f"`--input` ({folder}) is a folder without a file; give files or a glob.")
    for path, _ in texts_below(folder):
        ending = os.path.splitext(path)[1].lower()
        if ending in _NO_TEXTS:
            raise DataError(
                f"`--input` ({folder}) is read as a folder of texts, one document in each file, "
                f"but {path} is none; name such files by a glob, as in {folder}/**/*{ending}, and "
                "take the texts out of archives first."
            )
    return [folder]


def _saved_files(folder: str, state: str) -> list[str]:
    try:
        saved = read_json_object(state)
        if saved.get("_indices_data_files"):
            raise ValueError("it selects rows by indices, which flatten_indices() resolves")
        names = [str(entry["filename"]) for entry in saved["_data_files"]]
        if any(os.path.basename(name) != name for name in names):
            raise ValueError("a file lies outside of the folder")
    except (UnreadableFile, ValueError, KeyError, TypeError) as error:
        why = error.reason if isinstance(error, UnreadableFile) else repr(error)
        raise DataError(
            f"{state} does not list the files of a Hugging Face dataset ({why}); save the "
            "dataset again, or give its Arrow files."
        ) from None
    return [os.path.join(folder, name) for name in names]


def texts_below(folder: str) -> Iterator[tuple[str, int]]:
    """Yield (path, bytes) of each file below a folder, sorted; hidden files are left out.

    Raise a DataError for a folder that cannot be read.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(
            f"{folder} in `--input` cannot be read ({error.strerror}); check its permissions."
        ) from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from texts_below(entry.path)
        elif entry.is_file():
            yield entry.path, entry.stat().st_size


def identity_of_texts(folder: str) -> str:
    """Return a digest of the names, sizes and modification times of all files below a folder."""
    digest = hashlib.sha256()
    for path, size in texts_below(folder):
        about = os.stat(path)
        values = [path, size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
        digest.update(json.dumps(values).encode())
    return digest.hexdigest()


def write_list(folder: str, target: Path) -> None:
    """Write ``[path, bytes]`` of each text of a folder to ``target``, one JSON list per line."""
    temporary = target.with_suffix(".listing")
    with open_new(temporary, "wb") as out:
        for path, size in texts_below(folder):
            out.write(json.dumps([path, size]).encode() + b"\n")
    os.replace(temporary, target)


def list_spans(path: str, part_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Cut a list of texts, as `write_list` writes it, into pieces of whole lines.

    Yield (start, end, bytes of texts) of each piece. Start and end are byte offsets in the list's
    file; the texts that a piece lists have about ``part_bytes`` bytes in all.
    """
    start = end = size = 0
    with open(path, "rb") as stream:
        for line in stream:
            end += len(line)
            size += json.loads(line)[1]
            if size >= part_bytes:
                yield start, end, size
                start = end
                size = 0
    if end > start:
        yield start, end, size


def paths_in_list(path: str, start: int, end: int) -> list[str]:
    """Return the paths in the bytes [start, end) of a file that `write_list` has written."""
    with open(path, "rb") as stream:
        stream.seek(start)
        return [json.loads(line)[0] for line in stream.read(end - start).splitlines()]


def text_lines(paths: Sequence[str], key: str) -> Iterator[tuple[bytes, int]]:
    """Read text files as lines of JSON; yield (several lines, total size of their files in bytes).

    Each line is an object with the whole text of one file under ``key``. A file that is not UTF-8
    becomes a line with its raw bytes, without line ends; the encoder later refuses this line, and
    the error names the file.
    """
    lines = list[bytes]()
    size = 0
    for path in paths:
        try:
            content = read_bytes(path, limit=MAX_LINE_BYTES)
        except UnreadableFile as error:
            raise DataError(
                f"{path} cannot be read ({error.reason}); leave the input alone during the run "
                "and start again."
            ) from None
        try:
            lines.append(orjson.dumps({key: content.decode("utf-8-sig")}))
        except UnicodeDecodeError:
            lines.append(content.replace(b"\n", b" "))
        size += len(content)
        if size >= BLOCK_BYTES:
            yield b"\n".join([*lines, b""]), size
            lines = []
            size = 0
    if lines:
        yield b"\n".join([*lines, b""]), size


def key_of_texts(folder: str, keys: Sequence[str] | None) -> str:
    """Return the JSON key under which a folder's texts are read: the only one in ``keys``.

    Raise a ConfigError if ``keys`` has no or several keys, or is None, as with ``--sft``.
    """
    if keys is None or len(keys) != 1:
        given = "`--sft`" if keys is None else f"`--json-keys` ({' '.join(keys)})"
        raise ConfigError(
            f"`--input` ({folder}) is a folder of texts, which have no keys, so it does not go "
            f"with {given}; give files with rows."
        )
    return keys[0]
