"""A step on a GPU waits for it once, for the norm of the gradients, and nowhere else.

torch says so itself (``torch.cuda.set_sync_debug_mode``), but for collectives.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_ext.training.window import LogWindow
from tests.gpu.runs import one_gpu
from tests.runs_from_inside import build, one_step
from tests.training_runs import TINY, mock_data

pytestmark = pytest.mark.gpu

FLAGS = [*TINY, *mock_data(), "--train-iters", "100"]
WAITED = "called a synchronizing CUDA operation"
CASES = ["", "--bf16", "--bf16 --cross-entropy-impl eager", "--bf16 --mtp-num-layers 1"]


@contextlib.contextmanager
def sync_debug(mode: str) -> Iterator[None]:
    """torch raises (``error``) or warns (``warn``) where the host would wait."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("words", CASES)
def test_reading_and_both_passes_never_wait(words: str) -> None:
    with one_gpu() as context:
        run = build([*FLAGS, *words.split()], context)
        one_step(run, LogWindow(run))  # compilers and libraries set themselves up
        number = run.batch_size.num_microbatches
        with sync_debug("error"):
            batches = run.train_source.next_step(number)
            for chunk in run.chunks:
                chunk.zero_grad_buffer()
            run.runner.forward_backward(batches, number, forward_only=False)


@pytest.mark.parametrize("words", CASES)
def test_a_whole_step_waits_once(words: str) -> None:
    with one_gpu() as context:
        run = build([*FLAGS, *words.split()], context)
        window = LogWindow(run)
        one_step(run, window)
        assert _waits(lambda: one_step(run, window)) == 1
        window.report()


def test_what_waits_is_seen() -> None:
    x = torch.ones(3, device="cuda")
    with sync_debug("error"), pytest.raises(RuntimeError, match=WAITED):
        x.sum().item()
    assert _waits(lambda: (x.sum().item(), x.tolist())) == 2


def _waits(work: Any) -> int:
    with sync_debug("warn"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        work()
    return sum(WAITED in str(warning.message) for warning in seen)
