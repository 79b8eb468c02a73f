"""A rank that torchrun has started ends as its agent must see it."""

import os
import signal
from typing import Any

import pytest

from megatron_ext.errors import EXIT_CODE_NOT_SAVED
from megatron_ext.train import started_rank as module
from megatron_ext.train.exit_codes import EXIT_CODE_RESIZED, EXIT_CODE_SIGNAL
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.started_rank import run_started_rank
from megatron_ext.train.supervision import Supervision


class Left(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize(
    ("rank", "code", "elastic", "restarts", "told", "leaves_folder", "ends_agent"),
    [
        ("0", 1, False, True, [1], True, False),
        ("1", 1, False, True, [], True, False),
        ("0", EXIT_CODE_RESIZED, True, True, [EXIT_CODE_RESIZED], False, False),
        ("0", EXIT_CODE_SIGNAL, False, True, [EXIT_CODE_SIGNAL], True, True),
        ("0", EXIT_CODE_SIGNAL, False, False, [EXIT_CODE_SIGNAL], True, False),
        ("0", EXIT_CODE_SIGNAL, True, True, [EXIT_CODE_SIGNAL], True, False),
    ],
)
def test_the_end_of_a_rank_that_torchrun_has_started(
    rank: str,
    code: int,
    elastic: bool,
    restarts: bool,
    told: list[int],
    leaves_folder: bool,
    ends_agent: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Any] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(module, "is_under_torchrun", lambda: True)
    monkeypatch.setattr(module, "end_with_parent", lambda *_: None)
    monkeypatch.setattr(module, "parent_at_start", lambda: 77)
    monkeypatch.setattr(module, "restarts_by_torchrun", lambda: restarts)
    monkeypatch.setattr(module, "leave_exit_code", lambda code: events.append(("code", code)))
    monkeypatch.setattr(module, "leave_host_folder", lambda: events.append("folder"))
    monkeypatch.setattr(os, "kill", lambda pid, number: events.append((pid, number)))

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(module, "leave", leave)
    supervision = Supervision()
    supervision.is_elastic = elastic
    said: list[int] = []
    with pytest.raises(Left, match=str(code)):
        run_started_rank(lambda: code, ExitSignal(None), said.append, supervision)
    assert said == told
    assert events == [
        ("code", code),
        *["folder"] * leaves_folder,
        *[(77, signal.SIGTERM)] * ends_agent,
    ]


@pytest.mark.parametrize("number", [None, signal.SIGUSR1])
def test_a_rank_of_torchrun_ends_with_its_agent_and_has_not_saved_before_it_says_so(
    number: signal.Signals | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(module, "is_under_torchrun", lambda: True)
    monkeypatch.setattr(module, "parent_at_start", lambda: 77)
    monkeypatch.setattr(module, "end_with_parent", lambda *given: events.append(given))
    monkeypatch.setattr(module, "leave_exit_code", events.append)
    exit_signal = ExitSignal(number)
    monkeypatch.setattr(exit_signal, "end_by_sigterm", lambda tell: events.append("watches"))
    supervision: Any = Supervision()
    supervision.follow_earlier_process = lambda: events.append("counts")

    def main() -> int:
        events.append("runs")
        return 0

    assert run_started_rank(main, exit_signal, lambda _: None, supervision) == 0
    assert events == [
        (77, number or signal.SIGKILL),
        "counts",
        *([] if number is None else [EXIT_CODE_NOT_SAVED]),
        "watches",
        "runs",
        0,
    ]
