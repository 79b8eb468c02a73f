"""The host folder: files that the processes of a run share on one machine, in memory if possible.

It holds the ranks' heartbeats, stack traces, latest events and checkpoints in memory. A launcher
that forks its ranks creates and removes the folder. Under torchrun, the ranks of a machine use a
folder named after their agent. The agent outlives them, so the folder survives a restart.
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

from megatron_ext.disk.writing import open_descriptor, write_text

FOLDER_VARIABLE = "MEGATRON_EXT_HOST_FOLDER"
GENERATION_VARIABLE = "MEGATRON_EXT_GENERATION"
_PREFIX = f"megatron_ext_{os.getuid()}_"
_OF_AGENT = "_of_agent"
_SAVE = "save_folder"
"""Name of the file that stores the path of the run's save folder."""
SNAPSHOTS = ("snapshots", "non_persistent")
"""Subfolders of a host folder for checkpoints in memory, called snapshots: the first for
``--peer-checkpoint-interval``, the second for ``--non-persistent-ckpt-type in_memory``.
"""
RESIZE = "resize"
"""Name of a file that tells the ranks to save and exit, to be restarted in another number."""
TAKEN_OVER = "taken_over"
"""Name of an empty file in a host folder into which snapshots of a killed run were moved."""
_SECONDS_FOR_DYING_RANKS = 2.0
_LEFT = "exit_code_"
_SECONDS_UNTIL_STALE = 600.0
"""Age in seconds above which a folder that no process uses is removed."""


def host_folder() -> Path | None:
    """Return the folder that the run's processes on this machine share; None if there is none."""
    name = os.environ.get(FOLDER_VARIABLE)
    return Path(name) if name else None


def generation() -> int:
    """Return how many times this run has been restarted, by its launcher or by torchrun."""
    given = os.environ.get(GENERATION_VARIABLE) or os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return int(given or 0)


def is_asked_to_resize() -> bool:
    """Return whether the launcher has asked the ranks to save a checkpoint and exit.

    The launcher then restarts the run with another number of ranks.
    """
    folder = host_folder()
    return folder is not None and (folder / RESIZE).exists()


def is_under_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts_by_torchrun() -> int:
    """Return how many times torchrun may restart ranks that fail; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def ticks_at_start(pid: int) -> int | None:
    """Return the start time of a process in kernel clock ticks; None if the system hides it.

    psutil's start time is unsuitable: it shifts when the clock is set, and is exact only to a
    second.
    """
    try:
        # This is field 22. Field 2, in brackets, may contain spaces.
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


@contextmanager
def shared_host_folder(save: str | None = None) -> Iterator[Path | None]:
    """Yield the folder that this run shares on this machine, named in the environment for children.

    If the environment names a folder already, use it. Otherwise a rank that torchrun has started
    creates or opens the folder of its agent, and any other process creates a new one. If no folder
    can be created, print a note and yield None.

    At the end, a process that created a new folder removes it. The folder of an agent is removed by
    local rank 0, but not after an error: torchrun may then restart the ranks, which need it.

    Args:
        save: the run's save folder. Snapshots that killed runs with the same save folder left on
            this machine are moved into the host folder. None moves nothing.
    """
    if host_folder() is not None:
        _take_over(host_folder(), save)
        yield host_folder()
        return
    is_rank = "RANK" in os.environ
    folder, lock = _make(_name_of_agent(os.getppid()) if is_rank else None, save)
    if folder is None:
        yield None
        return
    os.environ[FOLDER_VARIABLE] = str(folder)
    keeps = is_rank
    try:
        with _sockets_in(folder):
            yield folder
        keeps = is_rank and os.environ.get("LOCAL_RANK", "0") != "0"
    finally:
        os.environ.pop(FOLDER_VARIABLE, None)
        os.close(lock)
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _sockets_in(folder: Path) -> Iterator[None]:
    """Within the context, let multiprocessing put its temporary files into ``folder``.

    A DataLoader worker passes tensors through a socket in a temporary folder, which multiprocessing
    removes when the worker exits. A worker that is killed leaves its socket behind, which is then
    removed together with ``folder``.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:
        yield  # keep the caller's
        return
    # `multiprocessing.util.get_temp_dir` looks here, and children copy it from their parent.
    config["tempdir"] = str(folder)
    before = multiprocessing.active_children()
    try:
        yield
    finally:
        config["tempdir"] = None
        # A worker that ended later would miss its socket and print an error.
        for child in multiprocessing.active_children():
            if child.daemon and child not in before:
                child.terminate()
                child.join()


def _name_of_agent(agent: int) -> str:
    """Return a unique name for the torchrun agent with the process id ``agent``.

    It includes the agent's start time. Process ids alone are not unique: they are reused, and
    containers with process ids of their own may share one ``/dev/shm``.
    """
    return f"{agent}_{ticks_at_start(agent)}{_OF_AGENT}"


def leave_host_folder() -> None:
    """Remove the host folder after this rank has failed, unless torchrun will restart the ranks.

    Only a folder that ranks created is removed, as under the plain ``torchrun`` command. The agent
    of `train.torchrun` creates and removes a folder itself.
    """
    folder = host_folder()
    used = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if folder is None or not folder.name.endswith(_OF_AGENT):
        return
    if used >= restarts_by_torchrun():
        shutil.rmtree(folder, ignore_errors=True)


def leave_exit_code(code: int) -> None:
    """Write this rank's exit code into the host folder, where torchrun's agent reads it."""
    folder = host_folder()
    if folder is not None:
        with suppress(OSError):
            path = folder / f"{_LEFT}{os.environ.get('LOCAL_RANK', '0')}"
            write_text(path, f"{generation()} {code}")


def exit_codes_left(folder: Path) -> list[int]:
    """Return the exit codes that ranks wrote into ``folder`` with `leave_exit_code`.

    Each restart of the ranks has a number (`generation`); only codes of the highest are returned.
    """
    left = [path.read_text(encoding="utf-8").split() for path in folder.glob(f"{_LEFT}*")]
    pairs = [(int(words[0]), int(words[1])) for words in left if len(words) == 2]
    newest = max((number for number, _ in pairs), default=0)
    return [code for number, code in pairs if number == newest]


def _make(name: str | None, save: str | None) -> tuple[Path | None, int]:
    """Create or open the host folder ``name`` and lock it; return it and the lock's descriptor.

    If ``name`` is None, create a folder with a new name. If no folder can be created, the result is
    (None, -1).

    Args:
        save: the run's save folder. Snapshots of killed runs with the same save folder are moved
            into the host folder. None moves nothing.
    """
    fault: OSError | None = None
    for root in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        try:
            if name is None:
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            else:
                folder = root / f"{_PREFIX}{name}"
                folder.mkdir(mode=0o700, exist_ok=True)
            _check_private(folder)
            lock = open_descriptor(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            _take_over(folder, save)
            # Not earlier: the agent's folder is old as well when its ranks are restarted.
            _remove_stale(root)
            return folder, lock
        except OSError as error:
            fault = error
    print(
        f"note: no heartbeats, for no folder can be shared ({fault})", file=sys.stderr, flush=True
    )
    return None, -1


def _take_over(folder: Path | None, save: str | None) -> None:
    """Move the snapshots of killed runs with the save folder ``save`` to ``folder``.

    If several runs left a subfolder of the same name in `SNAPSHOTS`, that of the run whose files
    changed last is moved. Then the host folders of these runs are removed. `checkpoint.resume`
    checks later whether the snapshots are whole. Only local rank 0 does this, before the ranks
    synchronize. Do nothing if ``folder`` or ``save`` is None.
    """
    if folder is None or save is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    own = os.path.realpath(save)
    with suppress(OSError):
        write_text(folder / _SAVE, own)
    left = [path for path in folder.parent.glob(f"{_PREFIX}*") if path != folder]
    for other in sorted(left, key=_newest_change, reverse=True):
        with suppress(OSError):
            _check_private(other)
            if _is_of_living_agent(other) or (other / _SAVE).read_text(encoding="utf-8") != own:
                continue
            with _unused(other):
                for name in SNAPSHOTS:
                    if (other / name).is_dir() and not (folder / name).exists():
                        os.rename(other / name, folder / name)
                        write_text(folder / TAKEN_OVER, "")
                shutil.rmtree(other, ignore_errors=True)


def _newest_change(folder: Path) -> float:
    """Return the latest modification time of all files and subfolders in a folder; 0 if empty."""
    times = [0.0]
    with suppress(OSError):
        times += [path.stat().st_mtime for path in folder.rglob("*")]
    return max(times)


@contextmanager
def _unused(folder: Path) -> Iterator[None]:
    """Within the context, hold an exclusive lock on a host folder.

    Wait a moment for a lock that another process holds, since ranks of a run that was just killed
    may not have exited yet. Raise an OSError if the lock is still held then.
    """
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    patience = time.monotonic() + _SECONDS_FOR_DYING_RANKS
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > patience:
                    raise
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


def _is_of_living_agent(folder: Path) -> bool:
    """Return whether a folder belongs to an agent of torchrun that is alive."""
    name = folder.name.removeprefix(_PREFIX)
    owner = name.partition("_")[0]
    return owner.isdecimal() and name == _name_of_agent(int(owner))


def _check_private(folder: Path) -> None:
    """Raise an OSError unless a folder belongs to this user, and only this user can open it.

    Another user could guess the folder's name and create it first. Its files are unpickled, so such
    a user could run code in this process.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that only this user may open; remove it")


def _remove_stale(root: Path) -> None:
    """Remove the host folders in ``root`` that killed runs have left.

    A folder is removed if it has not changed for `_SECONDS_UNTIL_STALE` and no process has locked
    it. The folder of a torchrun agent that is alive stays, since the agent may be about to restart
    its ranks.
    """
    for folder in root.glob(f"{_PREFIX}*"):
        if _is_of_living_agent(folder):
            continue
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _SECONDS_UNTIL_STALE:
                continue
            lock = open_descriptor(folder / "lock", os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
