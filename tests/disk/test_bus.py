"""A bus error is told with the file that it comes from, and ends a run like any other error."""

import faulthandler
import mmap
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from megatron_ext.data.indexed import bin_path, idx_path, read_index
from megatron_ext.data.loader import BatchSource, without_traceback
from megatron_ext.data.workers import worker_context
from megatron_ext.disk import bus
from megatron_ext.disk.host_folder import FOLDER_VARIABLE
from megatron_ext.errors import DataError, MachineFault, MegatronExtError
from megatron_ext.limits import SHARED_MEMORY
from tests.training_runs import SMALL, documents, train_on_ranks

SIZE = 64 * mmap.PAGESIZE


@pytest.fixture(autouse=True)
def _files_of_other_tests() -> Iterator[None]:
    """Forget the files that a test cuts, which a later test must not be told of."""
    before = dict(bus.mapped_sizes)
    yield
    bus.mapped_sizes.clear()
    bus.mapped_sizes.update(before)


def in_child(work: Callable[[], Any]) -> tuple[int, Any]:
    """Run work in a fork that tells bus errors; return its status, and its result or error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        bus.tell_bus_errors()
        try:
            result: Any = work()
        except MegatronExtError as error:
            result = error
        os.write(writer, pickle.dumps(result))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        content = stream.read()
    return os.waitpid(pid, 0)[1], pickle.loads(content) if content else None


def made(path: Path) -> Path:
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return path


@pytest.mark.parametrize("left", [0, mmap.PAGESIZE])
@pytest.mark.parametrize("remembered", [True, False])
def test_a_file_that_was_cut_is_named_with_both_sizes(
    tmp_path: Path, left: int, remembered: bool
) -> None:
    path = made(tmp_path / "web documents.bin")

    def work() -> Any:
        values = np.memmap(path, np.uint8, "r")
        if remembered:
            bus.remember_size(path, SIZE)
        os.truncate(path, left)
        return int(values[left]), values.sum()  # exactly at the end of what is left

    _, error = in_child(work)
    had = SIZE if remembered else f"more than {SIZE - mmap.PAGESIZE}"
    assert isinstance(error, DataError)
    assert str(error) == (
        f"{path} was cut while it was in use: it has {left} bytes, but had {had} when it was "
        "opened; copy or make it again, and leave it alone while a run uses it."
    )


OTHER_THREADS = """
import mmap, os, sys
import torch
from megatron_ext.errors import MachineFault
from megatron_ext.disk import bus

bus.tell_bus_errors()
with open(sys.argv[1], "r+b") as file:
    memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
os.truncate(sys.argv[1], 0)
torch.set_num_threads(4)
try:
    memory.copy_(torch.ones(len(memory), dtype=torch.uint8))
except MachineFault as fault:
    print(fault)
"""


def test_a_write_and_a_thread_that_holds_no_interpreter_are_told_too(tmp_path: Path) -> None:
    path = made(tmp_path / "snapshot")
    # In a process of its own: OpenMP's threads do not work in a fork of one that has used them.
    environment = {**os.environ, FOLDER_VARIABLE: str(tmp_path)}
    command = [sys.executable, "-c", OTHER_THREADS, str(path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    # What a run keeps for itself can be made again, so that another start makes sense.
    assert ended.returncode == 0 and str(path) in ended.stdout, ended.stderr


def test_an_index_that_was_cut_is_named(tmp_path: Path) -> None:
    documents(tmp_path / "docs", 3000)

    def work() -> Any:
        index = read_index(tmp_path / "docs")
        os.truncate(idx_path(tmp_path / "docs"), 100)
        return int(index.offsets[-1])

    size = idx_path(tmp_path / "docs").stat().st_size
    _, error = in_child(work)
    assert f"docs.idx was cut while it was in use: it has 100 bytes, but had {size}" in str(error)


def test_shared_memory_that_is_full_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    monkeypatch.setattr(bus, "SHARED_MEMORY", str(tmp_path))

    def work() -> Any:
        with (tmp_path / "torch_1").open("w+b") as file:
            os.truncate(file.fileno(), SIZE)
            memory = mmap.mmap(file.fileno(), 0)
        os.unlink(tmp_path / "torch_1")
        memory[:] = bytes(SIZE)
        return bytes(memory)

    _, error = in_child(work)
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    assert isinstance(error, MachineFault)
    assert str(error).startswith(f"The shared memory {SHARED_MEMORY} is full: ")


def test_a_signal_that_was_sent_ends_the_process_as_before() -> None:
    status, result = in_child(lambda: os.kill(os.getpid(), signal.SIGBUS))
    assert os.waitstatus_to_exitcode(status) == -signal.SIGBUS and result is None


class _Cut(Dataset[int]):
    def __init__(self, path: Path) -> None:
        self.values = np.memmap(path, np.uint8, "r")
        os.truncate(path, 0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(self.values[index])


def test_a_worker_tells_its_rank(tmp_path: Path) -> None:
    made(tmp_path / "a.bin")
    loader = DataLoader(
        _Cut(tmp_path / "a.bin"),
        num_workers=1,
        multiprocessing_context=worker_context(1),
        worker_init_fn=bus.worker_setup(),
    )
    with pytest.raises(DataError) as caught:
        list(loader)
    told = str(without_traceback(caught.value))
    assert told.startswith(f"{tmp_path}/a.bin was cut while it was in use: it has 0 bytes")
    assert "\n" not in told


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_whose_tokens_are_cut_ends_with_a_user_s_error(
    tmp_path: Path, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    documents(tmp_path / "docs", 2000)
    path = bin_path(tmp_path / "docs")

    def cut(run: Any) -> None:
        os.truncate(path, 10)

    words = [word for word in SMALL if word != "--mock-data"]
    words[words.index("--num-workers") + 1] = str(workers)
    words += ["--data-path", str(tmp_path / "docs")]
    code, _ = train_on_ranks(words, save=tmp_path / "save", prepare=cut)
    said = capfd.readouterr().err
    assert code == 2, said
    assert f"{path} was cut while it was in use: it has 10 bytes, but had" in said
    assert "Traceback" not in said and "shared memory" not in said


@pytest.mark.parametrize("number", [None, 5])
def test_a_file_that_was_cut_within_its_last_page_is_named_though_it_reads_as_zeros(
    tmp_path: Path, number: int | None
) -> None:
    path, other = made(tmp_path / "docs.bin"), made(tmp_path / "moved.bin")

    def work() -> Any:
        bus.mapped_sizes.clear()
        mapped = np.memmap(path, np.uint8, "r")
        bus.remember_size(path, SIZE)
        bus.remember_size(other, SIZE)
        before = bus.cut_file(number)
        # Another file of its name leaves the mapped one whole.
        made(tmp_path / "next").rename(other)
        os.truncate(other, 1)
        os.truncate(path, SIZE - 100)
        assert not mapped[-100:].any()
        named = [bus.cut_file(number) for number in range(4)] if number else [bus.cut_file()]
        return before, {str(error) for error in named if error is not None}

    _, result = in_child(work)
    sentence = (
        f"{path} was cut while it was in use: it has {SIZE - 100} bytes, but had {SIZE} when it "
        "was opened; copy or make it again, and leave it alone while a run uses it."
    )
    assert result == (None, {sentence})


class Garbage:
    """A loader whose file is cut while it reads, and which trips over what it reads, or not."""

    def __init__(self, path: Path, error: Exception | None) -> None:
        self.path, self.error = path, error

    def next_step(self, _number: int, _seq_length: int | None = None) -> list[Any]:
        os.truncate(self.path, SIZE - 1)
        if self.error is not None:
            raise self.error
        return []


@pytest.mark.parametrize("error", [IndexError("the shape of the mask"), None])
def test_garbage_out_of_a_cut_file_is_told_as_that(tmp_path: Path, error: Exception | None) -> None:
    path = made(tmp_path / "docs.idx")

    def work() -> Any:
        bus.mapped_sizes.clear()
        bus.remember_size(path, SIZE)
        return BatchSource(Garbage(path, error), None).next_step(1)  # type: ignore[arg-type]

    _, told = in_child(work)
    assert isinstance(told, DataError)
    assert str(told).startswith(f"{path} was cut while it was in use: it has {SIZE - 1} bytes")


def test_a_file_that_was_cut_is_told_once_and_one_of_the_run_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = tmp_path / "host"
    host.mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(host))
    monkeypatch.setattr(bus, "mapped_sizes", {})
    for path in (made(host / "snapshot"), made(tmp_path / "docs.bin")):
        bus.remember_size(path, SIZE)
        os.truncate(path, SIZE - 1)
    told = [str(error) for _ in range(3) if (error := bus.cut_file()) is not None]
    assert [text.partition(" ")[0] for text in told] == [f"{tmp_path}/docs.bin"]


@pytest.mark.parametrize("gone", [False, True])
def test_the_missing_page_of_a_part_of_a_file_is_that_of_the_file(
    tmp_path: Path, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map begins in the middle of the file, which may have lost its name since."""
    path = made(tmp_path / "docs.bin")
    monkeypatch.setattr(bus, "mapped_sizes", {})
    bus.remember_size(path, SIZE)
    half = SIZE // 2

    def work() -> Any:
        with open(path, "r+b") as file:
            content = mmap.mmap(file.fileno(), half, offset=half)
            os.truncate(file.fileno(), half)
            if gone:
                path.unlink()
            return content[0]

    _, error = in_child(work)
    assert str(error).startswith(f"{path} ")
    if not gone:  # Whether the file behind a name that is gone can be seen depends on rights.
        assert f"was cut while it was in use: it has {half} bytes, but had {SIZE}" in str(error)
