"""Checksums of indexed datasets, in the file that `sha256sum -c` reads."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from megatron_ext.data.indexed import bin_path, byte_bar, idx_path, readable
from megatron_ext.errors import ConfigError, DataError

_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_BYTES = 1 << 22


def digest_path(prefix: str | os.PathLike[str]) -> Path:
    """The file of a dataset's checksums."""
    return Path(f"{os.fspath(prefix)}.sha256")


def digests_of(prefix: str | os.PathLike[str]) -> dict[str, str]:
    """SHA-256 of both files of a dataset, by file name.

    Raises:
        DataError: a file is missing or cannot be read.
    """
    return {path.name: _digest(path) for path in (bin_path(prefix), idx_path(prefix))}


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with (
        readable(path),
        open(path, "rb") as stream,
        byte_bar(f"Digest of {path.name}", os.path.getsize(path)) as bar,
    ):
        while piece := stream.read(_BYTES):
            found.update(piece)
            bar.update(len(piece))
    return found.hexdigest()


def recorded_digests(prefix: str | os.PathLike[str]) -> dict[str, str] | None:
    """The checksums in `PREFIX.sha256`, None where there is no such file.

    Raises:
        DataError: it cannot be read, or does not name both files.
    """
    path = digest_path(prefix)
    if not path.exists():
        return None
    with readable(path):
        lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
    matches = [match for line in lines if (match := _LINE.fullmatch(line))]
    found = {match[2]: match[1] for match in matches}
    wanted = [file.name for file in (bin_path(prefix), idx_path(prefix))]
    if not set(wanted) <= set(found):
        raise DataError(
            f"{path} must hold a SHA-256 for {wanted[0]} and {wanted[1]}; write it again with "
            "`--write-digest`."
        )
    return {name: found[name] for name in wanted}


def verify(prefix: str | os.PathLike[str], digests: Mapping[str, str]) -> bool:
    """Compares checksums with those of `PREFIX.sha256`; returns whether that file exists.

    Raises:
        DataError: they differ.
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
    """Writes `PREFIX.sha256` and returns its path.

    Raises:
        ConfigError: it cannot be written.
    """
    path = digest_path(prefix)
    temporary = Path(f"{path}.writing.{os.getpid()}")
    try:
        temporary.write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"`--write-digest` cannot write {path} ({error.strerror}); make its folder writable, "
            "or leave the flag out."
        ) from None
    return path
