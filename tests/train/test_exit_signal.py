"""The exit signal, and the sentence about the work that a run has lost by a signal."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import (
    EXIT_CODE_INTERRUPTED,
    EXIT_CODE_NOT_SAVED,
    STOP_SIGNALS,
    held_signals,
    pass_over,
    release_signals,
)
from megatron_ext.train.exit_codes import (
    EXIT_CODE_NO_MEMORY,
    EXIT_CODE_SIGNAL,
    cause_of,
    code_of,
    meaning_of,
)
from megatron_ext.train.exit_codes import main as exit_code_main
from megatron_ext.train.exit_signal import ExitSignal, loss_at_end
from tests.training_runs import TINY, config_of, mock_data

FLAGS = [*TINY, *mock_data(), "--train-iters", "2"]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def of_run(*words: str) -> ExitSignal:
    return ExitSignal.of_run(config_of([*FLAGS, *words]).training)


def test_a_run_without_the_flag_changes_no_handler() -> None:
    signal.signal(signal.SIGTERM, pass_over)
    assert of_run().number is None
    assert signal.getsignal(signal.SIGTERM) is pass_over


def test_the_exit_signal_is_noted_and_sigterm_ignored_from_then_on() -> None:
    signal.signal(signal.SIGTERM, pass_over)
    mine = of_run("--exit-signal-handler", "--exit-signal", "SIGUSR1")
    # What SIGTERM did during the imports is over.
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not mine.came
    os.kill(os.getpid(), signal.SIGUSR1)
    assert mine.came
    os.kill(os.getpid(), signal.SIGTERM)
    mine.obey()
    assert all(signal.getsignal(number) is pass_over for number in STOP_SIGNALS)


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("--exit-signal-handler --exit-signal SIGUSR1", True),
        ("--exit-signal-handler", False),
        ("", False),
    ],
)
def test_another_signal_than_sigterm_lets_sigterm_end_unsaved(
    words: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = of_run(*words.split())
    before = signal.getsignal(signal.SIGTERM)
    events: list[Any] = []
    mine.end_by_sigterm(lambda code: events.append(("tell", code)))
    if ends:
        monkeypatch.setattr(os, "_exit", lambda code: events.append(("exit", code)))
        os.kill(os.getpid(), signal.SIGTERM)
        assert events == [("tell", EXIT_CODE_NOT_SAVED), ("exit", EXIT_CODE_NOT_SAVED)]
    else:
        assert signal.getsignal(signal.SIGTERM) is before


HANDLER = "--exit-signal-handler"
NOTHING = "nothing has been saved, as `--save` is not given; give it and"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            "",
            EXIT_CODE_SIGNAL,
            f"ended by SIGTERM: {NOTHING} `{HANDLER}`, and SIGTERM saves a checkpoint before the "
            "run ends.",
        ),
        (HANDLER, EXIT_CODE_SIGNAL, None),
        ("", 128 + signal.SIGUSR2, f"ended by SIGUSR2: {NOTHING} `{HANDLER} --exit-signal "
         "SIGUSR2`, and SIGUSR2 saves"),
        ("", EXIT_CODE_INTERRUPTED, f"interrupted: {NOTHING} `{HANDLER} --exit-signal SIGINT`, and "
         "Ctrl-C saves"),
        (f"{HANDLER} --exit-signal SIGUSR1", EXIT_CODE_NOT_SAVED, f"ended by SIGUSR1: {NOTHING} "
         f"`{HANDLER} --exit-signal SIGUSR1`, and SIGUSR1 saves"),
        (f"{HANDLER} --exit-signal SIGUSR1 --save FOLDER", EXIT_CODE_NOT_SAVED, "ended by SIGTERM: "
         f"nothing has been saved in `--save` (FOLDER); give `{HANDLER}`, and SIGTERM saves"),
        ("", 0, None),
        ("", 1, None),
        ("", 128 + signal.SIGKILL, None),
    ],
)  # fmt: skip
def test_what_a_run_that_a_signal_ended_has_lost(
    words: str, code: int, said: str | None, tmp_path: Path
) -> None:
    given = words.replace("FOLDER", str(tmp_path)).split()
    sentence = loss_at_end(code, config_of([*FLAGS, *given]))
    if said is None:
        assert sentence is None
    else:
        assert sentence is not None
        assert sentence.startswith(said.replace("FOLDER", str(tmp_path)))


def test_a_signal_that_arrives_while_signals_are_held_waits() -> None:
    came: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        with held_signals():
            # A signal to the process could reach another thread, such as one of torch's.
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            assert came == []
        assert came == [signal.SIGUSR1]
        # What was blocked before stays so.
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == {signal.SIGUSR2}
        release_signals()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])


def test_words_for_the_status_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    statuses = (-signal.SIGKILL, 1, EXIT_CODE_NO_MEMORY, 123, 124, 7)
    assert [cause_of(status) for status in statuses] == [
        "SIGKILL", "exception", "memory", "lost contact", "hang", "exit code 7",
    ]  # fmt: skip
    assert [code_of(status) for status in (0, 7, -signal.SIGTERM)] == [0, 7, 143]
    assert meaning_of(77) == "a rank ended with this code"
    assert meaning_of(128 + 126) == "a rank ended with this code"
    for words in ([], ["1", "2"], ["one"]):
        assert exit_code_main(words) == 2
    assert exit_code_main(["77"]) == 0
    assert capsys.readouterr().out == (
        "exit code 77: a rank ended with this code; worth another start\n"
    )
