"""Folders that a run writes to, and the cache of its samples, checked before ranks start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from megatron_ext.errors import DataError

_NPY = b"\x93NUMPY"


def why_not_writable(folder: Path) -> str | None:
    """Return why files could not be written to a folder that need not exist yet, None if they can.

    The answer comes from writing a file without a name to the nearest folder that exists:
    permissions say nothing of a read-only mount, of a full disk or of the superuser.
    """
    nearest = folder.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    try:
        with tempfile.TemporaryFile(dir=nearest, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        return error.strerror or str(error)
    return None


def check_cached_indices(prefixes: Iterable[str], data_cache_path: str | None, name: str) -> None:
    """Check the folders that indices are read from and written to.

    megatron-core lets numpy unpickle a file that is no array, and a stranger's data set may bring
    such a file in its cache; on rank 0 it fails where it cannot write.

    Args:
        data_cache_path: ``--data-cache-path``; None means a folder beside each data set.
        name: the class of data set, after which these folders are named.

    Raises:
        DataError: a file that is no array, or a folder that can neither be written nor be used as
            it is.
    """
    folders = [Path(prefix) / "cache" / f"{name}_indices" for prefix in prefixes]
    for folder in sorted(set(folders)) if data_cache_path is None else [Path(data_cache_path)]:
        files = sorted(folder.glob("*.npy")) if folder.is_dir() else []
        for path in files:
            _check_array(path)
        reason = why_not_writable(folder)
        # A cache that was filled before may lie where nobody writes.
        if reason is not None and not files:
            raise DataError(
                f"The indices of samples cannot be written to {folder} ({reason}); give a folder "
                "that can with `--data-cache-path`."
            )


def _check_array(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(len(_NPY))
    # An empty file is left by a run that was killed; megatron-core cannot unpickle it.
    if start and start != _NPY:
        raise DataError(
            f"{path} is no array of numpy, though its name says so, and could run code; remove it "
            "if you do not trust where the data comes from, or give another `--data-cache-path`."
        )
