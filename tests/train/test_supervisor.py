"""Which rank's end decides, when the others are killed, and what signals of the launcher do."""

import os
import signal
import time
from typing import Any

import pytest

from megatron_ext.errors import EXIT_CODE_INTERRUPTED, EXIT_CODE_NOT_SAVED
from megatron_ext.train import supervisor as module
from megatron_ext.train.exit_codes import (
    EXIT_CODE_LOST_CONTACT,
    EXIT_CODE_NO_ANSWER,
    EXIT_CODE_SIGNAL,
)
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.supervisor import SignalForwarder, Supervisor


class Forwarder(SignalForwarder):
    """Notes the signals that it would send to the ranks."""

    def __init__(self, number: signal.Signals | None = None) -> None:
        super().__init__(ExitSignal(number))
        self.sent: list[int] = []

    def send(self, number: int) -> None:
        self.sent.append(number)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_rank_that_failed_by_itself_decides_after_those_that_waited_for_it(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    forwarder = Forwarder()
    supervisor = Supervisor(forwarder, 10)
    supervisor._ended(0, EXIT_CODE_LOST_CONTACT)
    assert forwarder.sent == []
    supervisor._ended(2, EXIT_CODE_NO_ANSWER)
    supervisor._ended(1, -signal.SIGSEGV)
    assert supervisor._code == 128 + signal.SIGSEGV
    assert forwarder.sent == [signal.SIGTERM]
    # From now on ranks end because they are asked to.
    supervisor._ended(3, -signal.SIGTERM)
    supervisor._ended(4, 7)
    assert supervisor._code == 128 + signal.SIGSEGV
    assert capsys.readouterr().err == "[rank 1] was ended by SIGSEGV\n"
    clock[0] += 2.9
    supervisor._look(clock[0])
    assert forwarder.sent == [signal.SIGTERM]
    clock[0] += 0.2
    supervisor._look(clock[0])
    assert forwarder.sent == [signal.SIGTERM, signal.SIGKILL]


def test_ranks_that_end_after_one_did_not_answer_do_not_decide(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "is_stopped", lambda pid: pid == 52)
    forwarder = Forwarder()
    forwarder.children.update({52: 2, 51: 1})
    supervisor = Supervisor(forwarder, 10)
    supervisor._ended(0, EXIT_CODE_NO_ANSWER)
    clock[0] += 1.9
    supervisor._look(clock[0])
    assert forwarder.sent == []
    clock[0] += 0.2
    supervisor._look(clock[0])
    assert forwarder.sent == [signal.SIGTERM]
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("[rank 1] does not answer: ")
    assert second.startswith("[rank 2] has been stopped by a signal: ")
    supervisor._ended(1, -signal.SIGTERM)
    assert supervisor._code == EXIT_CODE_NO_ANSWER
    clock[0] += 0.6
    supervisor._look(clock[0])
    assert forwarder.sent == [signal.SIGTERM, signal.SIGKILL]


def test_after_a_lost_connection_no_rank_is_blamed_for_being_silent(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    forwarder = Forwarder()
    forwarder.children.update({51: 1})
    supervisor = Supervisor(forwarder, 10)
    supervisor._ended(0, EXIT_CODE_LOST_CONTACT)
    clock[0] += 2.1
    supervisor._look(clock[0])
    assert forwarder.sent == [signal.SIGTERM] and capsys.readouterr().err == ""
    assert supervisor._code == EXIT_CODE_LOST_CONTACT


def test_ranks_that_have_saved_give_the_others_a_minute(clock: list[float]) -> None:
    forwarder = Forwarder(signal.SIGTERM)
    supervisor = Supervisor(forwarder, 10)
    supervisor._ended(1, EXIT_CODE_SIGNAL)
    assert (supervisor._code, forwarder.sent) == (EXIT_CODE_SIGNAL, [])
    for seconds, sent in ((59, []), (2, [signal.SIGKILL])):
        clock[0] += seconds
        supervisor._look(clock[0])
        assert forwarder.sent == sent


def test_a_rank_that_ends_by_the_signal_that_it_was_sent_is_not_told(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    forwarder = Forwarder()
    forwarder.stop_signal = signal.SIGHUP
    supervisor = Supervisor(forwarder, 10)
    supervisor._ended(0, -signal.SIGHUP)
    assert capsys.readouterr().err == ""
    assert supervisor._code == 128 + signal.SIGHUP


def test_only_the_time_that_a_rank_is_stopped_without_a_break_counts(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forwarder = Forwarder()
    forwarder.children.update({51: 0, 52: 1})
    supervisor = Supervisor(forwarder, 1)
    stopped = {52}
    monkeypatch.setattr(module, "is_stopped", lambda pid: pid in stopped)

    def pass_seconds(seconds: float) -> list[int]:
        clock[0] += seconds
        supervisor._look(clock[0])
        return forwarder.sent

    assert pass_seconds(1) == []
    stopped.clear()
    assert pass_seconds(50) == []
    stopped.add(52)
    assert pass_seconds(20) == pass_seconds(60) == []
    assert pass_seconds(1) == [signal.SIGTERM]
    assert supervisor._code == EXIT_CODE_NO_ANSWER
    assert capsys.readouterr().err.startswith("[rank 1] has been stopped by a signal")


@pytest.mark.parametrize(
    ("exit_signal", "stop_signal", "code", "expected"),
    [
        (None, None, 7, 7),
        (None, signal.SIGINT, 7, EXIT_CODE_INTERRUPTED),
        (None, signal.SIGINT, 0, 0),
        (None, signal.SIGINT, 2, 2),
        (None, signal.SIGINT, EXIT_CODE_SIGNAL, EXIT_CODE_SIGNAL),
        (None, signal.SIGTERM, 1, 143),
        (signal.SIGUSR1, signal.SIGTERM, 1, EXIT_CODE_NOT_SAVED),
    ],
)
def test_the_code_of_a_launch_that_was_asked_to_end(
    exit_signal: signal.Signals | None, stop_signal: int | None, code: int, expected: int
) -> None:
    forwarder = Forwarder(exit_signal)
    forwarder.stop_signal = stop_signal
    assert forwarder.code(code) == expected


def test_a_second_interruption_kills_only_after_a_second(clock: list[float]) -> None:
    forwarder = Forwarder(signal.SIGUSR1)
    for after, number in (
        (0, signal.SIGTERM),
        (0, signal.SIGINT),
        (0.5, signal.SIGINT),
        (0.25, signal.SIGTERM),
        (0.25, signal.SIGINT),
    ):
        clock[0] += after
        forwarder._on_signal(number, None)
    sent: list[Any] = [signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT]
    assert forwarder.sent == sent
    clock[0] += 1
    forwarder._on_signal(signal.SIGINT, None)
    assert forwarder.sent == [*sent, signal.SIGKILL]
    assert not forwarder._exit_signal.came
    forwarder._on_signal(signal.SIGUSR1, None)
    assert forwarder._exit_signal.came
    assert (forwarder.stop_signal, forwarder.sent[-1]) == (signal.SIGINT, signal.SIGUSR1)
    assert forwarder.received == {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    # Ranks that save at Ctrl-C may take longer.
    saving = Forwarder(signal.SIGINT)
    for _ in range(3):
        saving._on_signal(signal.SIGINT, None)
        clock[0] += 2
    assert saving.sent == [signal.SIGINT] * 3


def test_handlers_are_restored_and_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    usual = signal.getsignal(signal.SIGUSR2)
    try:
        with Forwarder() as forwarder:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGUSR2)
            assert forwarder.sent == [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR2) is usual
    finally:
        signal.signal(signal.SIGHUP, before)
