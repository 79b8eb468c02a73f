"""A limit of the operating system is told by its name and value, whoever reports it."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext import limits

ROOT = Path(__file__).resolve().parents[1]
MEBIBYTE = 1 << 20


@contextmanager
def small_disk(folder: Path, size: int = MEBIBYTE) -> Iterator[Path]:
    """Yield a folder on a disk of its own that is full after ``size`` bytes.

    Where nothing may be mounted, a limit of file sizes stands in for it.
    """
    folder.mkdir(exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        with limited(resource.RLIMIT_FSIZE, size):
            yield folder
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def raised(work: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        work()
    return caught.value


def names_the_disk(text: str, folder: Path) -> bool:
    mounted = f"the disk of {folder} (mounted at {folder}) is full: "
    return mounted in text or "(RLIMIT_FSIZE)" in text


def with_open(folder: Path) -> None:
    (folder / "text").write_bytes(bytes(2 * MEBIBYTE))


def with_torch(folder: Path) -> None:
    torch.save(torch.zeros(MEBIBYTE), folder / "tensors.pt")


def with_numpy(folder: Path) -> None:
    np.zeros(MEBIBYTE).tofile(folder / "array")


def with_safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(MEBIBYTE)}, folder / "a.safetensors")


@pytest.mark.parametrize("write", [with_open, with_torch, with_numpy, with_safetensors])
def test_a_full_disk_is_named_whatever_writes_to_it(
    tmp_path: Path, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk") as folder:
        error = raised(lambda: write(folder))
        fault = limits.limit_fault(error, folder, 4 * MEBIBYTE)
        assert fault is not None and names_the_disk(fault, folder)
        assert "RLIMIT" in fault or "of 1.0 MiB are free, and 4.0 MiB are needed;" in fault
        # Without the folder, the command line says which disk is meant.
        monkeypatch.setattr(sys, "argv", ["program", "--tensorboard-dir", str(folder / "new")])
        sentence = limits.sentence(error)
        assert sentence is not None and names_the_disk(sentence[:1].lower() + sentence[1:], folder)


def test_a_file_that_is_damaged_is_no_full_disk(tmp_path: Path) -> None:
    (tmp_path / "damaged.pt").write_bytes(bytes(100))
    error = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
    assert limits.limit_fault(error, tmp_path) is None
    assert limits.cause(error, tmp_path) == str(error)
    assert limits.cause(OSError(errno.EACCES, "Permission denied"), tmp_path) == "Permission denied"
    assert limits.cause(ValueError()) == "ValueError"


def test_open_files_are_told_by_name(tmp_path: Path) -> None:
    files = list[int]()

    def open_many() -> None:
        while True:
            files.append(os.open("/dev/null", os.O_RDONLY))

    with limited(resource.RLIMIT_NOFILE, 200):
        error = raised(open_many)
        for file in files:
            os.close(file)
        said = limits.sentence(error)
    assert said == (
        "This process may have 200 open files (RLIMIT_NOFILE), which are all in use; raise the "
        "limit with `ulimit -n 65536`."
    )
    # As torch passes it on from a worker process, and as its C++ code says it.
    for text in (
        "Caught OSError in DataLoader worker process 0.\nOSError: [Errno 24] Too many open files",
        "unable to open shared memory object </torch_1> in read-write mode: Too many open files",
    ):
        told = limits.sentence(RuntimeError(text))
        assert told is not None and "(RLIMIT_NOFILE)" in told
    system = limits.sentence(OSError(errno.ENFILE, "Too many open files in system"))
    assert system is not None and "(fs.file-max)" in system


def test_threads_and_processes_are_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_PIDS", "/nowhere")
    thread = limits.sentence(RuntimeError("can't start new thread"))
    with limited(resource.RLIMIT_NPROC, 4000):
        thread = limits.sentence(RuntimeError("can't start new thread"))
        assert thread is not None
        assert thread.startswith("This user may have 4000 processes and threads (RLIMIT_NPROC),")

        def fork() -> int:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr(os, "fork", fork)
        assert limits.sentence(raised(lambda: os.fork())) == thread
        # A pipe or a socket without data says the same.
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        assert limits.sentence(raised(lambda: os.read(reader, 1))) is None
        os.close(reader)
        os.close(writer)


def test_a_container_s_limit_of_processes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pids.max").write_text("50\n")
    monkeypatch.setattr(limits, "_PIDS", str(tmp_path / "pids.max"))
    said = limits.sentence(RuntimeError("can't start new thread"))
    assert said is not None and said.startswith("This container may have 50 processes and threads")


def test_memory_is_a_limit_only_where_the_address_space_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")
    assert limits.sentence(MemoryError()) is None
    with limited(resource.RLIMIT_AS, 1 << 40):
        for one in (error, MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
            said = limits.sentence(one)
            assert said is not None
            assert said.startswith("This process may have an address space of 1.0 TiB (RLIMIT_AS)")


def test_shared_memory_that_is_full_is_told_with_its_size() -> None:
    text = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
    said = limits.sentence(RuntimeError(text))
    assert said is not None and said.startswith("The shared memory /dev/shm is full: ")
    assert "--shm-size" in said


def test_a_full_disk_without_a_name_is_the_one_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--save", str(tmp_path)])
    # As multiprocessing raises it where a semaphore finds no room in shared memory.
    error = OSError(errno.ENOSPC, "No space left on device")
    said = limits.sentence(error)
    assert said is not None and said.startswith("A disk is full, but /")
    assert "free by now; free some space where this program writes." in said
    with small_disk(tmp_path / "shm", 1 << 16) as folder:
        monkeypatch.setattr(limits, "SHARED_MEMORY", str(folder))
        if not folder.is_mount():
            pytest.skip("nothing may be mounted here")
        said = limits.sentence(error)
        assert said is not None and said.startswith(f"The shared memory {folder} is full: ")


def test_a_quota_and_a_limit_of_file_sizes_are_no_full_disk(tmp_path: Path) -> None:
    quota = limits.cause(OSError(errno.EDQUOT, "Disk quota exceeded"), tmp_path)
    assert quota.startswith(f"the disk quota of this user on the disk of {tmp_path} is used up")
    with limited(resource.RLIMIT_FSIZE, MEBIBYTE):
        error = raised(lambda: with_open(tmp_path))
        assert limits.sentence(error) == (
            "A file may have 1.0 MiB (RLIMIT_FSIZE), which is too little; raise the limit with "
            "`ulimit -f unlimited`."
        )


PROGRAM = """
import sys
from megatron_ext.errors import end_on_interrupt
end_on_interrupt()
raise {error}
"""


def ended_by(error: str) -> tuple[int, str]:
    words = [sys.executable, "-c", PROGRAM.format(error=error)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    return ended.returncode, ended.stderr


def test_a_program_that_meets_a_limit_at_any_time_ends_with_one_sentence() -> None:
    code, said = ended_by("OSError(24, 'Too many open files')")
    assert code == 1 and said.startswith("error: This process may have") and said.count("\n") == 1
    code, said = ended_by("ValueError('a fault of ours')")
    assert code == 1 and "Traceback" in said and "a fault of ours" in said
