"""A limit of the operating system is told by its name and value, whoever reports it."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("Disk quota exceeded"), "disk quota"),
        (OSError(errno.EDQUOT, "x"), "disk quota"),
        (RuntimeError("write: File too large"), "file size"),
        (OSError(errno.EFBIG, "x"), "file size"),
        (OSError(errno.EMFILE, "x"), "open files"),
        (OSError(errno.ENFILE, "x"), "files of the system"),
        (OSError(errno.ENOMEM, "x"), "address space"),
        (OSError(errno.ENOSPC, "x"), "disk"),
        (MemoryError("x"), "address space"),
        (RuntimeError("Too many open files in system"), "files of the system"),
        (RuntimeError("Too many open files"), "open files"),
        (RuntimeError("unable to allocate shared memory(shm) for file"), "shared memory"),
        (RuntimeError("out of shared memory"), "shared memory"),
        (RuntimeError("can't start new thread"), "processes"),
        (RuntimeError("fork: Resource temporarily unavailable"), "processes"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "address space"),
        (RuntimeError("mmap: Cannot allocate memory"), "address space"),
        (RuntimeError("std::bad_alloc"), "address space"),
        (ImportError("failed to map segment from shared object"), "address space"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "disk"),
        (RuntimeError("failed (os error 24)"), "open files"),
        (RuntimeError("OSError: [Errno 28] x"), "disk"),
        (RuntimeError("thread creation failed"), "processes"),
        (RuntimeError("Bus error: insufficient shared memory (shm)"), "shared memory"),
        (ValueError("No space left on device"), None),
        (OSError(errno.EACCES, "Permission denied"), None),
    ],
)
def test_the_limit_that_an_error_is_about(error: BaseException, kind: str | None) -> None:
    assert limits._kind(error) == kind


def test_the_first_cause_in_a_chain_decides() -> None:
    def chained(first: BaseException, *, explicit: bool) -> BaseException:
        try:
            try:
                raise first
            except BaseException as error:
                if explicit:
                    raise OSError(errno.ENFILE, "too many") from error
                raise ValueError("cleanup failed") from error
        except BaseException as last:
            return last

    many = OSError(errno.EMFILE, "Too many open files")
    for explicit in (True, False):
        said = limits.sentence(chained(many, explicit=explicit))
        assert said is not None and "(RLIMIT_NOFILE)" in said

    def in_context() -> None:
        try:
            raise many
        finally:
            raise ValueError("cleanup failed")

    said = limits.sentence(raised(in_context))
    assert said is not None and "(RLIMIT_NOFILE)" in said


@pytest.mark.parametrize(
    ("user", "limit", "group", "said"),
    [
        (1000, 100, 50, "this container may have 50 "),
        (1000, 50, 100, "this user may have 50 "),
        (1000, resource.RLIM_INFINITY, 100, "this container may have 100 "),
        # The superuser's own limit is not enforced.
        (0, 50, 100, "this container may have 100 "),
        (1000, 50, None, "this user may have 50 "),
    ],
)
def test_the_lower_limit_of_processes_is_told(
    user: int,
    limit: int,
    group: int | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "pids.max").write_text("max\n" if group is None else f"{group}\n")
    monkeypatch.setattr(limits, "_PIDS", str(tmp_path / "pids.max"))
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert limits._processes().startswith(said)


def usage(free: int) -> SimpleNamespace:
    return SimpleNamespace(total=1 << 50, used=0, free=free)


def test_a_disk_counts_as_full_below_a_mebibyte_and_as_empty_above_a_gibibyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: dict[str, int] = {}
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(free.get(str(path), 1 << 40)))
    short = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
    for size, full in ((MEBIBYTE - 1, True), (MEBIBYTE, False)):
        free[str(tmp_path)] = size
        assert (limits.limit_fault(short, tmp_path) is not None) is full
    # Of what the command line names, the fullest disk is meant.
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    words = [f"--save={tmp_path}/b", "--load", f"{tmp_path}/a", "--lr", "1e-3", f"{tmp_path}/c"]
    monkeypatch.setattr(sys, "argv", ["program", *words])
    for size, said in (((1 << 30) - 1, "is full: 1024.0 MiB of"), (1 << 30, "has 1.0 GiB free")):
        free.update({f"{tmp_path}/a": 1 << 39, f"{tmp_path}/b": size, f"{tmp_path}/c": 1 << 38})
        fault = limits.disk_fault(None)
        assert f"{tmp_path}/b " in fault and said in fault
        assert fault.startswith("a disk is full, but") == (size == 1 << 30)
    # A disk that the error names is the one, whatever is free there: a write may need more.
    free[f"{tmp_path}/a"] = 5 << 29
    fault = limits.disk_fault(tmp_path / "a", needed=1 << 32)
    assert "is full: 2.5 GiB of" in fault and ", and 4.0 GiB are needed; free" in fault


def test_a_disk_without_inodes_has_no_room_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for files, left, said in ((9, 0, "(all 9 inodes are in use)"), (9, 1, "is full"),
                              (0, 0, "is full")):  # fmt: skip
        found = SimpleNamespace(
            f_files=files, f_favail=left, f_ffree=3, f_bavail=3, f_bfree=3, f_blocks=9, f_frsize=1
        )
        monkeypatch.setattr(os, "statvfs", lambda _, found=found: found)
        assert said in limits.disk_fault(tmp_path)


def test_the_file_of_an_error_says_which_disk_is_meant(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "own" / "file"))
    assert f"the disk of {tmp_path}/own (" in limits.cause(error, tmp_path / "other")
    quota = OSError(errno.EDQUOT, "x", str(tmp_path / "own"))
    assert f"on the disk of {tmp_path}/own is used up" in limits.cause(quota, tmp_path)


def test_a_cause_is_a_clause_of_one_line() -> None:
    assert limits.cause(ValueError("It is odd. \nAnd so on.")) == "It is odd"
    # Nothing limits the size of files here.
    assert limits.cause(OSError(errno.EFBIG, "File too large.")) == "File too large"


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (MEBIBYTE, "1.0 MiB"),
        (5 << 29, "2.5 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes_in_a_suitable_unit(size: int, shown: str) -> None:
    assert limits._size(size) == shown


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
