"""Seeds of ranks, and errors of their connections told apart from limits of this machine."""

import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.parallel import context as module
from megatron_ext.parallel.context import NoAnswer, contact_fault, seed_everything

OPENS_TOO_MANY = """
import resource, tempfile
import torch.distributed as dist
from megatron_ext import limits
from megatron_ext.parallel.context import contact_fault

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
store = dist.FileStore(tempfile.mktemp(), 1)
try:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for _ in range(40):
        dist.new_group([0])
except RuntimeError as error:
    print(contact_fault(error), limits.sentence(error))
"""


def test_a_rank_that_may_open_no_more_connections_has_lost_none() -> None:
    words = [sys.executable, "-c", OPENS_TOO_MANY]
    said = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout
    assert said == (
        "None This process may have 40 open files (RLIMIT_NOFILE), which are all in use; raise "
        "the limit with `ulimit -n 65536`.\n"
    )


def test_a_connection_that_breaks_is_lost() -> None:
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    assert contact_fault(RuntimeError(text)) is NoAnswer.LOST


@pytest.mark.parametrize(("apart", "seed"), [(False, 1534), (True, 1554)])
def test_stages_and_replicas_get_the_seeds_of_megatron_lm(
    apart: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers: list[int] = []
    monkeypatch.setattr(module, "model_parallel_cuda_manual_seed", trackers.append)
    rank: Any = SimpleNamespace(pp_rank=3, dp_rank=2)
    seed_everything(rank, 1234, data_parallel_random_init=apart)
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    wanted = random.Random(seed).random(), np.random.RandomState(seed).rand()
    generator = torch.Generator().manual_seed(seed)
    assert drawn == (*wanted, torch.rand(1, generator=generator).item())
    assert trackers == [seed]
