"""The host folder: files that the processes of one run share on one machine, in memory if possible.

It holds the board of heartbeats, stacks, flight records and memory checkpoints. A launcher that
forks its ranks makes the folder and removes it. Under torchrun the ranks of a machine meet in the
folder of their agent, which outlives them, so the folder survives a restart of the workers.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_ext.faults.process import ticks_at_start

FOLDER_VARIABLE = "MEGATRON_EXT_HOST_FOLDER"
GENERATION_VARIABLE = "MEGATRON_EXT_GENERATION"
_PREFIX = f"megatron_ext_{os.getuid()}_"
_OF_AGENT = "_of_agent"
_SECONDS_UNTIL_STALE = 600.0
"""Age from which a folder that no process holds is removed."""


def host_folder() -> Path | None:
    """Return the host folder of this run, None if it has none."""
    name = os.environ.get(FOLDER_VARIABLE)
    return Path(name) if name else None


def generation() -> int:
    """Return how often this run has been restarted so far, by its launcher or by torchrun."""
    given = os.environ.get(GENERATION_VARIABLE) or os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return int(given or 0)


def is_under_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts_by_torchrun() -> int:
    """Return how often torchrun starts ranks that fail again; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


@contextmanager
def shared_host_folder() -> Iterator[Path | None]:
    """Make or join the host folder of this run, and name it in the environment meanwhile.

    A process that torchrun has started joins its agent's folder, and any other makes a new one. The
    folder is removed at the end, unless it was there before or this is a rank that raises an error.
    Where no folder can be made, a line says so and the run goes on without one.
    """
    if host_folder() is not None:
        yield host_folder()
        return
    is_rank = "RANK" in os.environ
    folder, lock = _make(_name_of_agent(os.getppid()) if is_rank else None)
    if folder is None:
        yield None
        return
    os.environ[FOLDER_VARIABLE] = str(folder)
    keeps = is_rank
    try:
        with sockets_in(folder):
            yield folder
        keeps = is_rank and os.environ.get("LOCAL_RANK", "0") != "0"
    finally:
        os.environ.pop(FOLDER_VARIABLE, None)
        os.close(lock)
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def sockets_in(folder: Path | None) -> Iterator[None]:
    """Let this process and its children keep the sockets of multiprocessing in one folder.

    A data worker hands its tensors over by a socket in a folder in the temporary folder, which it
    removes at its end. But it is killed when its rank has ended, so that the folder would stay.

    Args:
        folder: who made it removes it; None makes one that is removed at the end.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:
        yield  # those of a caller
        return
    sockets = folder or Path(tempfile.mkdtemp(prefix=_PREFIX))
    # Where `multiprocessing.util.get_temp_dir` looks, and what a child copies from its parent.
    config["tempdir"] = str(sockets)
    try:
        yield
    finally:
        config["tempdir"] = None
        if sockets != folder:
            shutil.rmtree(sockets, ignore_errors=True)


def _name_of_agent(agent: int) -> str:
    """Return a name for a process that no later process with its id shares.

    Containers give the same ids again and again, and may share one ``/dev/shm``.
    """
    return f"{agent}_{ticks_at_start(agent)}{_OF_AGENT}"


def leave_host_folder() -> None:
    """Remove the host folder of a rank that has failed, unless torchrun starts it again."""
    folder = host_folder()
    used = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if folder is not None and used >= restarts_by_torchrun():
        shutil.rmtree(folder, ignore_errors=True)


def _make(name: str | None) -> tuple[Path | None, int]:
    """Make or open the folder called ``name``, by default a new one; return it with its lock."""
    fault: OSError | None = None
    for root in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        try:
            if name is None:
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            else:
                folder = root / f"{_PREFIX}{name}"
                folder.mkdir(mode=0o700, exist_ok=True)
            _check_private(folder)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            # Only now, since the folder of an agent is old too when its ranks start again.
            _remove_stale(root)
            return folder, lock
        except OSError as error:
            fault = error
    print(
        f"note: no heartbeats, for no folder can be shared ({fault})", file=sys.stderr, flush=True
    )
    return None, -1


def _check_private(folder: Path) -> None:
    """Raise an OSError unless the folder is this user's alone, as another user knows its name.

    What is read from it is unpickled.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that only this user may open; remove it")


def _remove_stale(root: Path) -> None:
    """Remove folders of earlier runs that were killed: they are old, and no process holds them.

    An agent of torchrun that lives may be about to start its ranks again.
    """
    for folder in root.glob(f"{_PREFIX}*"):
        name = folder.name.removeprefix(_PREFIX)
        owner = name.partition("_")[0]
        if owner.isdecimal() and name == _name_of_agent(int(owner)):
            continue
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _SECONDS_UNTIL_STALE:
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
