"""A signal saves and ends the run with a known code; so does the clock."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import torch

from megatron_ext.checkpoint.files import read_tracker
from megatron_ext.config.parser import parse_args
from megatron_ext.text.task import TEXT
from megatron_ext.train.reporting.files import read_metrics
from megatron_ext.train.stop_requests import EXIT_CODE_SIGNAL, StopRequests
from tests.ranks import ParallelContext, ranks
from tests.training_runs import TINY, mock_data, train_on_ranks, training_rows


def test_the_exit_signal_saves_and_gives_its_code(tmp_path: Path) -> None:
    save = tmp_path / "save"

    def send_when_training() -> None:
        end = time.monotonic() + 60
        while len(read_metrics(save / "metrics.jsonl")) < 3 and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send_when_training)
    sender.start()
    flags = [*TINY, *mock_data(), "--train-iters", "500", "--exit-signal-handler"]
    code, rows = train_on_ranks(flags, ranks=2, save=save)
    sender.join()
    assert code == EXIT_CODE_SIGNAL == 143
    assert 3 <= len(training_rows(rows)) < 500
    assert read_tracker(save) == training_rows(rows)[-1]["iteration"]


def test_the_time_limit_saves_and_ends_well(tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = [*TINY, *mock_data(), "--train-iters", "500", "--exit-duration-in-mins", "0.03"]
    code, rows = train_on_ranks(flags, save=save)
    assert code == 0
    assert len(training_rows(rows)) < 500
    assert read_tracker(save) == training_rows(rows)[-1]["iteration"]


@ranks(dp=2)
def test_a_gpu_is_told_a_step_later_on_all_ranks_alike(context: ParallelContext) -> None:
    flags = [*TINY, *mock_data(), "--train-iters", "5", "--exit-signal-handler"]
    requests = StopRequests(
        parse_args(flags, TEXT, world_size=2, device="cpu").config.training, time.time()
    )
    device = torch.device("cpu")
    assert requests.check(device, late=True) is None
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert requests.check(device, late=True) is None
    assert requests.check(device, late=True) == "signal"
    assert requests.check(device) == "signal"
