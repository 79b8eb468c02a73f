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

from megatron_ext.disk.writing import open_descriptor, write_text

FOLDER_VARIABLE = "MEGATRON_EXT_HOST_FOLDER"
GENERATION_VARIABLE = "MEGATRON_EXT_GENERATION"
_PREFIX = f"megatron_ext_{os.getuid()}_"
_OF_AGENT = "_of_agent"
_SAVE = "save_folder"
"""The file that names the save folder of the run."""
SNAPSHOTS = ("snapshots", "non_persistent")
"""The folders of memory checkpoints within a host folder."""
RESIZE = "resize"
"""The file that asks the ranks to save and to end, for another number of them."""
TAKEN_OVER = "taken_over"
"""The file that says that the memory checkpoints are those of an earlier run."""
_SECONDS_FOR_DYING_RANKS = 2.0
_LEFT = "exit_code_"
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


def is_asked_to_resize() -> bool:
    """Return whether the launcher has asked the ranks to save and to end."""
    folder = host_folder()
    return folder is not None and (folder / RESIZE).exists()


def is_under_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts_by_torchrun() -> int:
    """Return how often torchrun starts ranks that fail again; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def ticks_at_start(pid: int) -> int | None:
    """Return when a process began, in ticks of the kernel's clock; None if the system hides it.

    psutil gives the time of day, which changes with the clock and is exact to a second only.
    """
    try:
        # The 22nd field; the 2nd, in brackets, may contain spaces.
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


@contextmanager
def shared_host_folder(save: str | None = None) -> Iterator[Path | None]:
    """Make or join the host folder of this run, and name it in the environment meanwhile.

    What killed runs with the same save folder, ``save``, have left in memory is taken over.

    A process that torchrun has started joins its agent's folder, and any other makes a new one. The
    folder is removed at the end, unless it was there before or this is a rank that raises an error.
    Where no folder can be made, a line says so and the run goes on without one.
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
    """Let this process and its children keep the sockets of multiprocessing in a folder.

    A data worker hands its tensors over by a socket in a folder in the temporary folder, which it
    removes at its end. But it is killed when its rank has ended, so that the folder would stay.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:
        yield  # those of a caller
        return
    # Where `multiprocessing.util.get_temp_dir` looks, and what a child copies from its parent.
    config["tempdir"] = str(folder)
    before = multiprocessing.active_children()
    try:
        yield
    finally:
        config["tempdir"] = None
        # One that ended later would look in vain for its socket, and say so.
        for child in multiprocessing.active_children():
            if child.daemon and child not in before:
                child.terminate()
                child.join()


def _name_of_agent(agent: int) -> str:
    """Return a name for a process that no later process with its id shares.

    Containers give the same ids again and again, and may share one ``/dev/shm``.
    """
    return f"{agent}_{ticks_at_start(agent)}{_OF_AGENT}"


def leave_host_folder() -> None:
    """Remove the host folder of a rank that has failed, unless torchrun starts it again.

    A folder that an agent of `train.torchrun` has made is left to it.
    """
    folder = host_folder()
    used = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if folder is None or not folder.name.endswith(_OF_AGENT):
        return
    if used >= restarts_by_torchrun():
        shutil.rmtree(folder, ignore_errors=True)


def leave_exit_code(code: int) -> None:
    """Leave the exit code of this rank to its agent, for `exit_codes_left`."""
    folder = host_folder()
    if folder is not None:
        with suppress(OSError):
            path = folder / f"{_LEFT}{os.environ.get('LOCAL_RANK', '0')}"
            write_text(path, f"{generation()} {code}")


def exit_codes_left(folder: Path) -> list[int]:
    """Return the exit codes that ranks have left in ``folder`` after their newest restart."""
    left = [path.read_text(encoding="utf-8").split() for path in folder.glob(f"{_LEFT}*")]
    pairs = [(int(words[0]), int(words[1])) for words in left if len(words) == 2]
    newest = max((number for number, _ in pairs), default=0)
    return [code for number, code in pairs if number == newest]


def _make(name: str | None, save: str | None) -> tuple[Path | None, int]:
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
            lock = open_descriptor(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            _take_over(folder, save)
            # Only now, since the folder of an agent is old too when its ranks start again.
            _remove_stale(root)
            return folder, lock
        except OSError as error:
            fault = error
    print(
        f"note: no heartbeats, for no folder can be shared ({fault})", file=sys.stderr, flush=True
    )
    return None, -1


def _take_over(folder: Path | None, save: str | None) -> None:
    """Move the snapshots of killed runs with the same save folder here, and remove their folders.

    The newest come first; what is whole among them is for `checkpoint.resume` to find out. The
    first rank of a machine does this, before the ranks meet.
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
    """Return when something in a folder was last made or written."""
    times = [0.0]
    with suppress(OSError):
        times += [path.stat().st_mtime for path in folder.rglob("*")]
    return max(times)


@contextmanager
def _unused(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that no living process uses; raise an OSError if one does.

    The ranks of a run that was just killed may take a moment to end.
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
    """Return whether a folder is that of an agent of torchrun that lives."""
    name = folder.name.removeprefix(_PREFIX)
    owner = name.partition("_")[0]
    return owner.isdecimal() and name == _name_of_agent(int(owner))


def _check_private(folder: Path) -> None:
    """Raise an OSError unless only this user may open the folder, whose name others know.

    What is read from it is unpickled.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that only this user may open; remove it")


def _remove_stale(root: Path) -> None:
    """Remove folders of earlier runs that were killed: they are old, and no process holds them.

    An agent of torchrun that lives may be about to start its ranks again.
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
