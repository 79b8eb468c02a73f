"""A file of a checkpoint is whole, summed and on the disk, or its writer gets the error."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint import summed_file
from megatron_ext.checkpoint.files import describe_file
from megatron_ext.checkpoint.summed_file import SummedFile

BUFFER = 8192
PWRITE = os.pwrite
Write = Callable[[int, Any, int], int]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed_file, "_BUFFER_BYTES", BUFFER)


def content(size: int) -> bytes:
    return bytes(n * n % 251 for n in range(size))


def check_written(path: Path, size: int) -> None:
    """Write a file in pieces of several lengths, and compare it with what was given."""
    whole = content(size)
    with SummedFile(path) as file:
        position = 0
        for length in (1, 100, 0, BUFFER + 1, size):
            piece = whole[position : position + length]
            assert file.write(memoryview(piece)) == len(piece)
            position += len(piece)
            assert file.tell() == position
    assert path.read_bytes() == whole
    assert file.checksum.entry() == describe_file(path)


@pytest.mark.parametrize("size", [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 5 * BUFFER, 7 * BUFFER + 9])
def test_all_lengths_are_written_and_summed(tmp_path: Path, size: int) -> None:
    check_written(tmp_path / "file", size)


def test_values_of_any_type_are_written_as_bytes(tmp_path: Path) -> None:
    values = memoryview(content(1600)).cast("d", [20, 10])
    with SummedFile(tmp_path / "file") as file:
        assert file.write(values) == 1600
    assert (tmp_path / "file").read_bytes() == content(1600)


def test_whole_buffers_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this system has no direct writes")
    try:
        os.close(os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    direct = list[tuple[int, bool]]()

    def record(descriptor: int, data: Any, position: int) -> int:
        is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        direct.append((len(data), is_direct))
        return PWRITE(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", record)
    check_written(tmp_path / "file", 2 * BUFFER + 5)
    assert direct == [(BUFFER, True), (BUFFER, True), (5, False)]


def test_a_file_system_without_direct_writes_takes_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some refuse to open the file so, others to write."""
    opened = summed_file.open_descriptor
    flags = list[int]()

    def refuse_to_open(path: Any, how: int) -> int:
        flags.append(how)
        if how & summed_file._DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, how)

    with monkeypatch.context() as patch:
        patch.setattr(summed_file, "open_descriptor", refuse_to_open)
        check_written(tmp_path / "a", 3 * BUFFER + 1)
        assert len(flags) == 2

    def refuse_to_write(descriptor: int, data: Any, position: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & summed_file._DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return PWRITE(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", refuse_to_write)
    check_written(tmp_path / "b", 3 * BUFFER + 1)


def test_a_write_that_takes_only_a_part_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest begins in the middle of a block, where no direct write can begin."""
    monkeypatch.setattr(os, "pwrite", lambda a, data, b: PWRITE(a, data[: len(data) // 2 + 1], b))
    check_written(tmp_path / "file", 2 * BUFFER + 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EINVAL])
@pytest.mark.parametrize("buffers", [0, 1, 4])
def test_an_error_of_the_thread_reaches_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, buffers: int
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(number, "an error")

    monkeypatch.setattr(os, "pwrite", fail)
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("an incomplete file is flushed"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="an error"), SummedFile(tmp_path / "file") as file:
        file.write(content(buffers * BUFFER + 1))
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_error_of_the_caller_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("an incomplete file is flushed"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyError, match="the caller"), SummedFile(tmp_path / "file") as file:
        file.write(content(3 * BUFFER))
        raise KeyError("the caller")
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_end_of_a_file_is_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch flushes a file before it writes the last bytes of its buffer."""
    sizes = list[int]()
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    with SummedFile(tmp_path / "file") as file:
        file.write(content(BUFFER + 7))
        file.close()
    assert sizes == [BUFFER + 7]
