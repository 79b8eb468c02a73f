"""Worker processes of a data loader that are still there when their rank ends."""

import subprocess
import sys

import pytest

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
