"""Worker processes of a data loader that are still there when their rank ends."""

import subprocess
import sys

ENDS_WITH_WORKERS = """
import torch
from torch.utils.data import DataLoader
from megatron_ext.data.workers import worker_context
from megatron_ext.faults.bus import worker_setup

loader = DataLoader(
    torch.arange(64),
    num_workers=2,
    persistent_workers=True,
    multiprocessing_context=worker_context(2),
    worker_init_fn=worker_setup(),
)
iterator = iter(loader)
print(next(iterator).item(), flush=True)
"""


def test_a_program_that_ends_with_workers_left_says_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WITH_WORKERS], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
