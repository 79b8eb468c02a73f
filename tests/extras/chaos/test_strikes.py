"""Injected faults are real: the kernel, torch and the other end of a connection say so."""

import errno
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from megatron_ext.extras.chaos.strikes import STRIKES, InjectedFault, Target, watch_fsync

linux = pytest.mark.skipif(sys.platform != "linux", reason="uses limits and files of Linux")


def target(**options: object) -> Target:
    return Target(lambda text: None, Random(1), **options)  # type: ignore[arg-type]


def status_of(body: Callable[[], object]) -> int:
    """Run ``body`` in a fork, and return its status, also if it stops; 0 if it returns."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        code = 99
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return status


@pytest.mark.parametrize(
    ("kind", "number"), [("SIGKILL", signal.SIGKILL), ("SIGSEGV", signal.SIGSEGV)]
)
def test_a_process_is_ended_by_the_signal(kind: str, number: int) -> None:
    status = status_of(lambda: STRIKES[kind](target()))
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == number


def test_a_process_is_stopped() -> None:
    status = status_of(lambda: STRIKES["SIGSTOP"](target()))
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP


def test_an_exception_is_raised() -> None:
    with pytest.raises(InjectedFault):
        STRIKES["exception"](target())


@linux
def test_memory_runs_out_in_the_allocator_of_torch() -> None:
    def body() -> None:
        with pytest.raises((RuntimeError, MemoryError), match="allocate memory|bad_alloc"):
            STRIKES["memory"](target())

    assert status_of(body) == 0


@linux
def test_the_kernel_refuses_to_write_until_the_disk_has_room_again(tmp_path: Path) -> None:
    def body() -> None:
        full = target()
        STRIKES["full disk"](full)
        (tmp_path / "small").write_bytes(b"x" * 1000)
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            (tmp_path / "large").write_bytes(b"x" * 1_000_000)
        for undo in full.undo:
            undo()
        (tmp_path / "large").write_bytes(b"x" * 1_000_000)

    assert status_of(body) == 0


def test_one_fsync_fails_in_any_process_of_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", os.fsync)
    victim = target(fsync_fails=watch_fsync())

    def fails() -> None:
        with (tmp_path / "file").open("wb") as file:
            os.fsync(file.fileno())
            STRIKES["failed fsync"](victim)
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                os.fsync(file.fileno())
            os.fsync(file.fileno())

    fails()
    assert status_of(fails) == 0


def test_one_byte_of_the_newest_checkpoint_changes_before_the_kill(tmp_path: Path) -> None:
    before = bytes(range(256)) * 8
    for iteration in (5, 10):
        folder = tmp_path / f"iter_{iteration:07d}"
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(before)
        (folder / "__1_0.distcp").write_bytes(before[:100])
    (tmp_path / "host/snapshots").mkdir(parents=True)
    full = target(save=tmp_path, host=tmp_path / "host")
    status = status_of(lambda: STRIKES["corrupt checkpoint"](full))
    assert not (tmp_path / "host/snapshots").exists()
    assert os.WTERMSIG(status) == signal.SIGKILL
    after = (tmp_path / "iter_0000010/__0_0.distcp").read_bytes()
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
    assert (tmp_path / "iter_0000005/__0_0.distcp").read_bytes() == before
    assert (tmp_path / "iter_0000010/__1_0.distcp").read_bytes() == before[:100]


def test_one_element_of_one_gradient_is_not_a_number() -> None:
    chunk = torch.nn.Linear(5, 3)
    for parameter in chunk.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    STRIKES["NaN gradient"](target(chunks=[chunk]))
    bad = [int(p.main_grad.isnan().sum()) for p in chunk.parameters()]  # type: ignore[attr-defined]
    assert sum(bad) == 1


def test_one_bit_of_one_weight_flips() -> None:
    chunk = torch.nn.Linear(5, 3, dtype=torch.bfloat16)
    before = [p.detach().clone().view(torch.int16) for p in chunk.parameters()]
    STRIKES["bit flip"](target(chunks=[chunk]))
    after = [p.detach().view(torch.int16) for p in chunk.parameters()]
    flipped = [int(x) ^ int(y) for a, b in zip(before, after, strict=True)
               for x, y in zip(a.view(-1), b.view(-1), strict=True)]  # fmt: skip
    assert sum((bits & 0xFFFF).bit_count() for bits in flipped) == 1


@linux
def test_the_busiest_connection_is_lost_at_both_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        quiet, busy = (socket.create_connection(server.getsockname()) for _ in range(2))
        others = [server.accept()[0] for _ in range(2)]
        busy.sendall(b"x" * 10_000)
        assert status_of(lambda: STRIKES["lost socket"](target())) == 0
        far = next(end for end in others if end.getpeername() == busy.getsockname())
        while far.recv(1 << 16):
            pass
        quiet.sendall(b"y")
        near = next(end for end in others if end is not far)
        assert near.recv(1) == b"y"
        for end in (quiet, busy, *others):
            end.close()
