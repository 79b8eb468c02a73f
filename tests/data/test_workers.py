"""Worker processes of a data loader that are still there when their rank ends."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from megatron_ext.data.workers import worker_context

ENDS_WITH_WORKERS = """
from contextlib import nullcontext
import torch
from torch.utils.data import DataLoader
from megatron_ext.data.workers import worker_context
from megatron_ext.disk.bus import worker_setup
from megatron_ext.disk.host_folder import shared_host_folder

loader = DataLoader(
    torch.arange(64),
    num_workers=2,
    persistent_workers=True,
    multiprocessing_context=worker_context(2),
    worker_init_fn=worker_setup(),
)
with FOLDER:
    iterator = iter(loader)
    print(next(iterator).item(), flush=True)
END
"""


@pytest.mark.parametrize("end", ["", "del iterator"])
@pytest.mark.parametrize("folder", ["nullcontext()", "shared_host_folder()"])
def test_a_program_that_ends_with_workers_left_says_nothing(folder: str, end: str) -> None:
    program = ENDS_WITH_WORKERS.replace("FOLDER", folder).replace("END", end)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def _sleep() -> None:
    time.sleep(60)


@pytest.mark.parametrize("in_thread", [False, True])
def test_the_handler_of_dead_workers_is_back_after_a_worker_was_ended(in_thread: bool) -> None:
    """A worker ignores SIGTERM, so it is killed; torch is told of later deaths again."""
    told: list[int] = []

    def handler(number: int, frame: object) -> None:
        told.append(number)

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        context = worker_context(1)
        assert context is not None and worker_context(0) is None
        process = context.Process(target=_sleep)
        process.start()
        if in_thread:
            thread = threading.Thread(target=process.terminate)
            thread.start()
            thread.join()
        else:
            process.terminate()
            assert told == [], "the death that was asked for is no fault"
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)
