"""Writing into a folder of a stranger follows no link and waits for no pipe."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.disk.writing import (
    NotRegular,
    cleared,
    is_regular,
    lock_path,
    open_descriptor,
    open_new,
    open_to_append,
    own_folder,
    remove,
    why_not_writable,
    write_bytes,
    write_error,
    write_text,
)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("secret")
    return path


def _append(path: Path) -> None:
    with open_to_append(path) as file:
        file.write("more")


def _cut(path: Path) -> None:
    os.close(open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC))


WHOLE: list[Callable[[Path], object]] = [
    lambda path: write_text(path, "new"),
    lambda path: write_bytes(path, b"new"),
    lambda path: open_new(path).close(),
    lambda path: cleared(path).write_text("new"),
]


@pytest.mark.parametrize("write", WHOLE)
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_whole_file_takes_the_place_of_a_link(
    write: Callable[[Path], object], link: Callable[..., None], tmp_path: Path, secret: Path
) -> None:
    path = tmp_path / "loss.png"
    link(secret, path)
    write(path)
    assert secret.read_text() == "secret"
    assert is_regular(path) and path.read_text() in ("new", "")


@pytest.mark.parametrize("write", [*WHOLE, _append, _cut])
def test_no_write_waits_for_the_reader_of_a_pipe(
    write: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "faults.jsonl"
    os.mkfifo(path)
    if write in WHOLE:
        write(path)
        assert is_regular(path)
        return
    with pytest.raises(NotRegular, match="a pipe, a device or a socket, which is not written to"):
        write(path)


@pytest.mark.parametrize("write", [_append, _cut])
def test_a_file_that_is_opened_as_it_is_must_be_no_link(
    write: Callable[[Path], object], tmp_path: Path, secret: Path
) -> None:
    path = tmp_path / ".lock"
    for target in (secret, tmp_path / "absent", tmp_path):
        path.symlink_to(target)
        with pytest.raises(NotRegular, match=r"\.lock is a symbolic link, .* remove it"):
            write(path)
        path.unlink()
    assert secret.read_text() == "secret" and not (tmp_path / "absent").exists()


def test_a_file_with_two_names_is_copied_before_it_is_appended_to(
    tmp_path: Path, secret: Path
) -> None:
    path = tmp_path / "progress.txt"
    os.link(secret, path)
    with pytest.raises(NotRegular, match="a hard link to a file with another name"):
        _cut(path)
    os.close(open_descriptor(path, os.O_RDONLY))
    _append(path)
    assert secret.read_text() == "secret" and path.read_text() == "secretmore"


def test_plain_files_are_written_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_text(path, "ü")
    _append(path)
    assert path.read_text(encoding="utf-8") == "ümore"
    os.close(open_descriptor(path, os.O_WRONLY | os.O_TRUNC))
    assert path.read_bytes() == b""
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_folder_takes_the_place_of_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "iter_0000002.tmp"
    target.mkdir()
    (target / "kept").touch()
    link.symlink_to(target)
    assert own_folder(link) == link and not link.is_symlink()
    (link / "own").touch()
    assert [path.name for path in target.iterdir()] == ["kept"]
    assert own_folder(link) == link and (link / "own").exists()
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(FileExistsError):
        own_folder(file)
    assert file.read_text() == "mine"


def test_removing_a_link_leaves_its_target(tmp_path: Path, secret: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    (folder / "kept").touch()
    for target in (folder, secret, tmp_path / "absent"):
        link.symlink_to(target)
        remove(link)
        assert not os.path.lexists(link)
    assert (folder / "kept").exists() and secret.exists()
    remove(folder)
    remove(folder)
    assert not folder.exists()


def test_shared_memory_of_a_process_is_opened_by_its_descriptor() -> None:
    memory = os.memfd_create("memory")
    try:
        other = open_descriptor(Path(f"/proc/{os.getpid()}/fd/{memory}"), os.O_RDWR)
        os.write(other, b"same")
        os.close(other)
        assert os.pread(memory, 4, 0) == b"same"
    finally:
        os.close(memory)


@pytest.mark.parametrize("lock", ["fcntl.lockf", "fcntl.flock"])
def test_a_lock_with_two_names_is_replaced_unless_a_run_holds_it(
    lock: str, tmp_path: Path, secret: Path
) -> None:
    """`cp -al` of the folder of a run that goes on gives its lock a second name."""
    path = tmp_path / ".lock"
    os.link(secret, path)
    code = (
        f"import fcntl\nfile = open({str(path)!r}, 'r+')\n{lock}(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\ninput()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        with pytest.raises(BlockingIOError, match=r"a run that goes on has locked .*\.lock"):
            lock_path(path)
        assert path.exists()
        holder.communicate(b"\n")
    assert lock_path(path) == str(path) and not path.exists()
    assert secret.read_text() == "secret"


def test_a_lock_that_is_a_link_is_replaced(tmp_path: Path, secret: Path) -> None:
    path = tmp_path / ".lock"
    path.symlink_to(secret)
    assert lock_path(path) == str(path) and not os.path.lexists(path)
    path.touch()
    assert lock_path(path) == str(path) and path.exists()
    assert secret.read_text() == "secret"


def test_what_can_be_written_is_known_before_it_is_there(tmp_path: Path) -> None:
    """Missing folders will be made; the folder of a file counts, not the file itself."""
    deep = tmp_path / "a" / "b" / "c"
    assert why_not_writable(tmp_path) is None and why_not_writable(deep) is None
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "loss.png"
    file.write_text("old")
    assert write_error("--picture", str(file), is_file=True) is None
    assert file.read_text() == "old"
    for given, is_file in ((file, False), (file / "a", False), (file / "a", True)):
        told = str(write_error("--save", str(given), is_file=is_file))
        assert told.startswith(
            f"`--save` ({given}) cannot be written ({file} is no folder); give a "
        )
        assert told.endswith(f"{'file' if is_file else 'folder'} that can.")
