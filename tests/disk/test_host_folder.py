"""The host folder: made by a launcher, joined under torchrun, removed at the end."""

import fcntl
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megatron_ext.disk import host_folder as host
from megatron_ext.disk.host_folder import (
    exit_codes_left,
    generation,
    host_folder,
    leave_exit_code,
    leave_host_folder,
    shared_host_folder,
)


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", host.FOLDER_VARIABLE, host.GENERATION_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_a_launcher_makes_a_folder_and_removes_it() -> None:
    assert host_folder() is None
    with shared_host_folder() as folder:
        assert folder is not None and folder.is_dir() and host_folder() == folder
        with shared_host_folder() as inner:
            assert inner == folder
        assert folder.is_dir()
    assert not folder.exists() and host_folder() is None


JOIN = (
    "import os, sys\n"
    "from megatron_ext.disk.host_folder import shared_host_folder\n"
    "with shared_host_folder() as folder:\n"
    "    (folder / os.environ['RANK']).touch()\n"
    "    print(folder, sorted(p.name for p in folder.iterdir()), flush=True)\n"
    "    if os.environ['RANK'] == '1': os._exit(9)\n"
)


def test_ranks_of_one_agent_share_a_folder_that_outlives_a_failed_worker() -> None:
    def worker(rank: int) -> str:
        given = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        done = subprocess.run([sys.executable, "-c", JOIN], env=given, capture_output=True)
        return done.stdout.decode()

    folder, _, names = worker(1).partition(" ")
    assert names == "['1', 'lock']\n"
    assert worker(0) == f"{folder} ['0', '1', 'lock']\n"
    assert not Path(folder).exists()


def test_the_last_failure_under_torchrun_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"run{host._OF_AGENT}"
    folder.mkdir()
    monkeypatch.setenv(host.FOLDER_VARIABLE, str(folder))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    for count, stays in ((0, True), (1, True), (2, False)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        leave_host_folder()
        assert folder.exists() is stays


def test_folders_of_killed_runs_are_removed_once_they_are_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_SECONDS_UNTIL_STALE", 60.0)
    # The last one is of an earlier process with the id of the one before.
    agents = host._name_of_agent(os.getpid()), f"{os.getpid()}_1_of_agent"
    names = "old", "held", "young", *agents
    folders = [tmp_path / f"{host._PREFIX}{name}" for name in names]
    for folder in folders:
        folder.mkdir()
        (folder / "lock").touch()
    _, held, young, *_ = folders
    past = time.time() - 3600
    for folder in set(folders) - {young}:
        os.utime(folder, (past, past))
    with (held / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        host._remove_stale(tmp_path)
    # An agent that lives is about to start its ranks again.
    assert [path.exists() for path in folders] == [False, True, True, True, False]


def test_a_folder_that_others_may_open_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "Path", lambda _: tmp_path)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    folder = tmp_path / f"{host._PREFIX}{host._name_of_agent(os.getppid())}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    for make in (lambda: folder.symlink_to(tmp_path / "elsewhere"), lambda: folder.mkdir()):
        make()
        if not folder.is_symlink():
            folder.chmod(0o777)
        with shared_host_folder() as found:
            assert found is None
        assert "only this user" in capsys.readouterr().err and not any(folder.iterdir())
        folder.unlink() if folder.is_symlink() else folder.rmdir()


def test_the_generation_is_that_of_the_launcher_or_of_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert generation() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert generation() == 2
    monkeypatch.setenv(host.GENERATION_VARIABLE, "5")
    assert generation() == 5


def left_behind(root: Path, save: str, content: str) -> Path:
    """Return the host folder that a killed run has left, with a snapshot."""
    folder = Path(tempfile.mkdtemp(prefix=host._PREFIX, dir=root))
    (folder / "lock").touch()
    (folder / host._SAVE).write_text(os.path.realpath(save))
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "own_0.0").write_text(content)
    return folder


def test_the_next_start_takes_over_what_a_killed_run_of_the_same_folder_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_SECONDS_FOR_DYING_RANKS", 0.2)
    root, save = Path("/dev/shm"), str(tmp_path / "save")
    older, newer = (left_behind(root, save, text) for text in ("older", "newer"))
    for path in (older, *older.rglob("*")):
        os.utime(path, (1, 1))
    another = left_behind(root, str(tmp_path / "another"), "another")
    alive = left_behind(root, save, "alive")
    lock = os.open(alive / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        with shared_host_folder(save) as folder:
            assert folder is not None and (folder / host.TAKEN_OVER).exists()
            assert (folder / "snapshots" / "own_0.0").read_text() == "newer"
            assert not older.exists() and not newer.exists()
            assert another.exists() and alive.exists()
        assert not folder.exists()
    finally:
        os.close(lock)
        shutil.rmtree(another)
        shutil.rmtree(alive)


def test_what_an_agent_keeps_for_its_next_ranks_is_not_taken_over(tmp_path: Path) -> None:
    """Between two starts of them nobody holds the lock of its folder."""
    save = str(tmp_path / "save")
    own = tmp_path / f"{host._PREFIX}own"
    own.mkdir()
    agents = host._name_of_agent(os.getpid()), f"{os.getpid()}_1{host._OF_AGENT}"
    living, dead = (tmp_path / f"{host._PREFIX}{name}" for name in agents)
    left_behind(tmp_path, save, "living").rename(living)
    host._take_over(own, save)
    assert living.is_dir() and not (own / "snapshots").exists()
    assert not (own / host.TAKEN_OVER).exists()
    left_behind(tmp_path, save, "dead").rename(dead)
    host._take_over(own, save)
    assert living.is_dir() and not dead.exists()
    assert (own / "snapshots" / "own_0.0").read_text() == "dead"


def test_sockets_of_data_workers_lie_in_the_folder_and_go_with_it(tmp_path: Path) -> None:
    """A socket of `multiprocessing` stays when its worker is killed."""
    assert multiprocessing.current_process()._config.get("tempdir") is None  # type: ignore[attr-defined]
    with shared_host_folder() as folder:
        assert folder is not None
        assert multiprocessing.util.get_temp_dir() == str(folder)
        child = multiprocessing.get_context("fork").Process(target=_listen)
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert [path.name[:9] for path in folder.iterdir() if path.is_socket()] == ["listener-"]
    assert not folder.exists()
    assert multiprocessing.current_process()._config.get("tempdir") is None  # type: ignore[attr-defined]


def _listen() -> None:
    """Open a socket, as a data worker does to hand over a tensor, and end by a signal."""
    listener = multiprocessing.connection.Listener()
    assert listener.address
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_failed_rank_leaves_the_folder_of_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(host.FOLDER_VARIABLE, str(tmp_path))
    leave_host_folder()
    assert tmp_path.is_dir()


def test_exit_codes_are_those_of_the_newest_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exit_codes_left(tmp_path) == []
    leave_exit_code(7)  # There is no folder to write it into.
    monkeypatch.setenv(host.FOLDER_VARIABLE, str(tmp_path))
    for restart, rank, code in ((0, 0, 3), (0, 1, 4), (0, 2, 5), (1, 1, 9), (1, 2, 2)):
        monkeypatch.setenv(host.GENERATION_VARIABLE, str(restart))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        leave_exit_code(code)
        if (restart, rank) == (0, 2):
            assert sorted(exit_codes_left(tmp_path)) == [3, 4, 5]
    (tmp_path / "exit_code_3").write_text("1")  # cut short
    assert sorted(exit_codes_left(tmp_path)) == [2, 9]


def test_the_first_rank_of_a_machine_alone_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = str(tmp_path / "save")
    left = left_behind(tmp_path, save, "left")
    own = tmp_path / f"{host._PREFIX}own"
    own.mkdir()
    for rank in ("1", "0"):
        assert left.exists() and not (own / "snapshots").exists()
        monkeypatch.setenv("LOCAL_RANK", rank)
        host._take_over(own, save)
    assert not left.exists() and (own / "snapshots" / "own_0.0").read_text() == "left"


def test_a_folder_of_another_user_is_not_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    host._check_private(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="must be a folder that only this user may open"):
        host._check_private(tmp_path)


def test_workers_of_the_caller_outlive_the_folder() -> None:
    """Data workers that were begun within it end with it, since their sockets are gone."""
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=time.sleep, args=(60,), daemon=x) for x in (True, True)]
    before, within = children
    before.start()
    try:
        with shared_host_folder():
            within.start()
        assert before.is_alive() and not within.is_alive()
    finally:
        before.kill()
        before.join()


@pytest.mark.parametrize(
    ("rank", "fails", "stays"),
    [(None, False, False), (None, True, False), ("0", False, False), ("0", True, True),
     ("1", False, True), ("1", True, True)],
)  # fmt: skip
def test_a_folder_stays_for_ranks_that_are_started_again(
    rank: str | None, fails: bool, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
    folder = None
    try:
        with shared_host_folder() as folder:
            assert host_folder() == folder
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert host_folder() is None and folder is not None
    assert folder.exists() == stays
    shutil.rmtree(folder, ignore_errors=True)
