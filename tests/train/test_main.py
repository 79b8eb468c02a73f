"""Starts of a run, its ends by a signal or by the clock, and warnings that are known."""

import logging
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from megatron_ext import device as devices
from megatron_ext.checkpoint.files import read_tracker
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.train.exit_codes import EXIT_CODE_SIGNAL, EXIT_CODE_USER_ERROR
from megatron_ext.train.main import LOGGED, main, silence_known_warnings
from megatron_ext.train.reporting.files import read_metrics
from megatron_ext.train.run import StopRequests
from tests import training_runs
from tests.ranks import ParallelContext, ranks

FLAGS = [*training_runs.TINY, *training_runs.mock_data(), "--train-iters", "500"]


def test_the_exit_signal_saves_and_gives_its_code(tmp_path: Path) -> None:
    def send_when_training() -> None:
        end = time.monotonic() + 60
        while len(read_metrics(tmp_path / "metrics.jsonl")) < 3 and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send_when_training)
    sender.start()
    code, rows = training_runs.train_on_ranks(
        [*FLAGS, "--exit-signal-handler"], ranks=2, save=tmp_path
    )
    sender.join()
    assert code == EXIT_CODE_SIGNAL == 143
    assert 3 <= len(training_runs.training_rows(rows)) < 500
    assert read_tracker(tmp_path) == training_runs.training_rows(rows)[-1]["iteration"]


def test_the_time_limit_saves_and_ends_well(tmp_path: Path) -> None:
    flags = [*FLAGS, "--train-iters", "100000", "--exit-duration-in-mins", "0.1"]
    rows = training_runs.train_steps(flags, tmp_path)
    assert 1 <= len(rows) < 100000
    assert read_tracker(tmp_path) == rows[-1]["iteration"]


@ranks(dp=2)
def test_a_gpu_is_told_a_step_later_on_all_ranks_alike(context: ParallelContext) -> None:
    training = training_runs.config_of([*FLAGS, "--exit-signal-handler"], ranks=2).training
    requests = StopRequests(training, time.time())
    device = torch.device("cpu")
    assert requests.check(device, late=True) is None
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert requests.check(device, late=True) is None
    assert requests.check(device, late=True) == "signal"
    assert requests.check(device) == "signal"


COLLECTIVE = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use another."
DEFAULT = "full scope is deprecated. Use empty cuda_graph_modules to capture the whole layer."
ORDER = (
    "When using sequence parallelism it is recommended to set the environment variable "
    "CUDA_DEVICE_MAX_CONNECTIONS to 1"
)


@pytest.mark.parametrize(
    ("device", "message", "kind", "heard"),
    [
        ("cpu", COLLECTIVE, FutureWarning, False),
        ("cuda", COLLECTIVE, FutureWarning, False),
        ("cpu", DEFAULT, UserWarning, False),
        ("cpu", ORDER, UserWarning, False),
        ("cuda", ORDER, UserWarning, True),
        ("cpu", "the data is odd", UserWarning, True),
    ],
)
def test_known_noise_is_silent(device: str, message: str, kind: type[Warning], heard: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence_known_warnings(device)
        warnings.warn(message, kind, stacklevel=1)
    assert bool(caught) is heard


def test_what_core_logs_for_programmers_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    silence_known_warnings("cpu")
    once = [list(logging.getLogger(name).filters) for name in LOGGED]
    silence_known_warnings("cpu")
    assert [logging.getLogger(name).filters for name in LOGGED] == once
    for name, message in LOGGED.items():
        logging.getLogger(name).warning("a class: %s and more", message)
        logging.getLogger(name).warning("the model is odd")
    assert caplog.messages == ["the model is odd"] * len(LOGGED)


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
CP2 = "--context-parallel-size 2"


@pytest.mark.parametrize(
    ("words", "generation", "given", "seen"),
    [
        (TP2, 9, None, "1"),
        (CP2, 9, None, "1"),
        (TP2, None, None, "1"),  # what the GPU is cannot be told
        (TP2, 9, "8", "8"),
        (TP2, 10, None, None),
        ("", 9, None, None),
    ],
)
def test_the_order_of_launches_is_set_before_the_driver_starts(
    words: str,
    generation: int | None,
    given: str | None,
    seen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    found: list[str | None] = []

    def starts_the_driver() -> bool:
        found.append(os.environ.get(name))
        return False

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(devices, "_generation", lambda: generation)
    monkeypatch.setattr(torch.cuda, "is_available", starts_the_driver)
    assert main(GPT, [*FLAGS, *words.split(), "--nproc-per-node", "2", "--print-config"]) == 0
    assert found and set(found) == {seen}


NOWHERE = "--load FOLDER/b --loss FOLDER/c.py:Loss"
IN_ORDER = ("/b) holds no checkpoint;", "/c.py:Loss) cannot be imported")
HF = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER/tok"
DATASETS = "--data-path FOLDER/d FOLDER/e"
ABSENT = ("/d.idx does not exist;", "/e.idx does not exist;")
NULL = "--tokenizer-type NullTokenizer --vocab-size 128"
GPT2 = "--tokenizer-type GPT2BPETokenizer --vocab-file FOLDER/v --merge-file FOLDER/m"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{NULL} {NOWHERE} {DATASETS}", (*IN_ORDER, *ABSENT)),
        # The tokenizer's check hides that of the data.
        (f"{HF} {DATASETS} --eval-iters 0", ("/tok) does not exist; give a", *ABSENT)),
        (f"{GPT2} --data-order direct {DATASETS}", ("/v) is not a file", "/m) is not a", *ABSENT)),
        # An error of a flag hides all of them.
        (
            f"--lr abc {HF} {NOWHERE} --data-args-path FOLDER/f",
            ("`--lr` (abc) must", *IN_ORDER, "/tok) does not", "`--data-args-path` ("),
        ),
        (f"{NULL} --lr -1 {DATASETS}", ("`--lr` (-1.0) must be at least 0", *ABSENT)),
        # Neither the data nor the schedule of it is missing because a flag's own words are.
        (f"{NULL} --data-path --mock-dat", ("`--data-path` takes", "`--mock-dat` is not a")),
        (
            "--data-order direct --data-schedule FOLDER/s --lr abc --load-hf FOLDER/hf",
            ("`--lr` (abc)", "/hf/config.json cannot be read", "`--data-schedule` ("),
        ),
        (
            f"--sft --sft-chat-template FOLDER/t {HF} {DATASETS} --lr abc",
            (
                "`--lr` (abc)",
                "/tok) does not exist",
                "`--sft-chat-template` (",
                "/d) is neither a file of conversations",
                "/e) is neither a file of conversations",
            ),
        ),
        # A checkpoint that describes the model is looked for before the flags are read.
        (
            f"{NULL} --use-checkpoint-args --load FOLDER/b --lr abc --vocab-size -3 {DATASETS}",
            ("`--lr` (abc)", "/b) is no folder;", "`--vocab-size` (-3) must", *ABSENT),
        ),
        (f"--print-config --lr abc {HF} {NOWHERE} {DATASETS}", ("`--lr` (abc) must",)),
    ],
)
def test_all_that_is_missing_is_told_together(
    words: str, expected: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = words.replace("FOLDER", str(tmp_path)).split()
    assert main(TEXT, [*training_runs.TINY, "--train-iters", "1", *given]) == EXIT_CODE_USER_ERROR
    shown = capfd.readouterr().err.splitlines()
    assert len(shown) == len(expected), shown
    for part, line in zip(expected, shown, strict=True):
        assert part in line
