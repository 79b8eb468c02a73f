"""A step on a GPU never waits for what it launches; only an entry of the log does.

torch reports each wait itself (``torch.cuda.set_sync_debug_mode``), but for collectives and events:
the host reads from pinned memory what the update of the step before did, which is over by then.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_ext.device.rates import has_fp8
from megatron_ext.optim.update import decides_on_device
from megatron_ext.train.metrics import IntervalMetrics
from megatron_ext.train.run import Run
from tests.gpu.runs import one_gpu
from tests.runs_from_inside import build, one_step
from tests.training_runs import TINY, mock_data

pytestmark = pytest.mark.gpu

FLAGS = [*TINY, *mock_data(), "--train-iters", "100"]
WAITED = "called a synchronizing CUDA operation"
CASES = [
    "",
    "--bf16 --ema-decay 0.9",
    "--bf16 --cross-entropy-impl eager --log-num-zeros-in-grad",
    "--bf16 --mtp-num-layers 1",
    "--bf16 --no-use-distributed-optimizer",
    "--bf16 --ffn-hidden-size 192 --fp8-format hybrid",
    "--bf16 --ffn-hidden-size 192 --fp8-format hybrid --fp8-recipe rowwise",
]


@contextlib.contextmanager
def sync_debug(mode: str) -> Iterator[None]:
    """Let torch raise (``error``) or warn (``warn``) where the host would wait."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("words", CASES)
def test_a_whole_step_never_waits(words: str) -> None:
    """Reading its batch, both passes, the update, the average and the counters."""
    if "--fp8-format" in words and not has_fp8(torch.device("cuda", 0)):
        pytest.skip(f"{torch.cuda.get_device_name()} does not multiply 8-bit floats")
    with one_gpu() as context:
        run = build([*FLAGS, *words.split()], context)
        window = IntervalMetrics(run)
        for _ in range(2):  # compilers and libraries set themselves up
            one_step(run, window)
        with sync_debug("error"):
            one_step(run, window)
        assert not run.runner.settled
        assert run.progress.skipped_iterations == 0
        window.report()
        assert run.runner.settled


def test_the_queue_never_drains() -> None:
    """The host is ahead: when it has launched a step, the GPU has not finished it."""
    with one_gpu() as context:
        run = build([*FLAGS, "--bf16"], context)
        window = IntervalMetrics(run)
        one_step(run, window)
        number = run.batch_size.num_microbatches
        batches = run.train_source.next_step(number)
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 30)  # about half a second, which all that follows waits for
        one_step(run, window, batches)
        assert not torch.cuda.current_stream().query()


def test_a_bad_gradient_skips_the_step_on_the_gpu() -> None:
    """Weights, moments and rate stay as they are, and the host counts the step later."""
    with one_gpu() as context:
        run = build([*FLAGS, "--bf16"], context)
        assert run.optimizer is not None and decides_on_device(run.optimizer)
        window = IntervalMetrics(run)
        one_step(run, window)
        window.settle()
        before = [p.detach().clone() for chunk in run.chunks for p in chunk.parameters()]
        rate = run.optimizer.param_groups[0]["lr"]
        run.runner.observer = lambda: _spoil(run)
        one_step(run, window)
        run.runner.observer = None
        assert run.progress.skipped_iterations == 0
        window.settle()
        assert run.progress.skipped_iterations == 1
        assert run.optimizer.param_groups[0]["lr"] == rate
        after = [p.detach() for chunk in run.chunks for p in chunk.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        one_step(run, window)
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _spoil(run: Run) -> None:
    next(run.chunks[0].parameters()).main_grad.fill_(math.nan)


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
