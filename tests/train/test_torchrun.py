"""The exit code of torchrun is that of the rank that failed by itself, or of what a signal did."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_ext.train import torchrun as module
from megatron_ext.train.exit_codes import FOLDER_VARIABLE


def failed(codes: dict[int, tuple[int, int]]) -> ChildFailedError:
    """Return torchrun's error of ranks that failed, each with a code and a time."""
    failures = {}
    for rank, (code, time) in codes.items():
        failure = ProcessFailure(rank, 1000 + rank, code, "none")
        failure.message = {"message": "", "extraInfo": {"timestamp": time}}
        failure.timestamp = time
        failures[rank] = failure
    return ChildFailedError("main", failures)


def ended(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, left: set[int], *words: str
) -> int:
    """Return the exit code if torchrun raises ``error`` after ranks have left exit codes."""

    def torchrun(_: list[str]) -> None:
        if error is not None:
            raise error

    @contextmanager
    def codes(_: Path | None) -> Iterator[set[int]]:
        yield left

    monkeypatch.setattr(module, "torchrun", torchrun)
    monkeypatch.setattr(module, "_ended_ranks", codes)
    return module.run_torchrun(words)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({0: (7, 20), 1: (9, 10)}, 9),
        # Ranks that lost another one, or waited for it, do not decide, though they end first.
        ({0: (123, 10), 1: (124, 20), 2: (5, 30)}, 5),
        ({0: (124, 20), 1: (123, 10)}, 123),
        ({0: (-9, 10)}, 137),
    ],
)
def test_the_first_rank_that_failed_by_itself_decides(
    codes: dict[int, tuple[int, int]],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "new" / "codes"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    assert ended(monkeypatch, failed(codes), set()) == expected
    (path,) = folder.iterdir()
    assert path.read_text() == str(expected)


@pytest.mark.parametrize(
    ("number", "left", "words", "expected"),
    [
        (signal.SIGTERM, {0, 143}, [], 0),
        (signal.SIGTERM, {143, 125}, [], 143),
        (signal.SIGTERM, {121}, [], 143),
        (signal.SIGINT, {121}, [], 143),
        (signal.SIGTERM, {125}, [], 125),
        (signal.SIGTERM, set(), ["train.py", "--exit-signal-handler"], 125),
        (signal.SIGTERM, set(), [], 143),
        (signal.SIGINT, {125}, ["train.py", "--exit-signal-handler"], 130),
    ],
)
def test_after_a_signal_the_code_says_whether_the_ranks_have_saved(
    number: int,
    left: set[int],
    words: list[str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "codes"))
    error = SignalException("ended", signal.Signals(number))
    assert ended(monkeypatch, error, left, *words) == expected
    # A node that a signal ended does not decide for the others.
    assert not (tmp_path / "codes").exists()


def test_after_a_signal_ranks_have_time_to_save_before_they_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    ranks = [SimpleNamespace(kill=lambda number=number: done.append(number)) for number in (1, 2)]
    monkeypatch.setattr(module, "ignore_stop_signals", lambda: done.append("ignores signals"))
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(children=lambda: ranks))

    def wait(processes: list[Any], seconds: float) -> tuple[list[Any], list[Any]]:
        assert processes == ranks
        done.append(seconds)
        (tmp_path / "exit_code_0").write_text("0 143")
        return ranks[:1], ranks[1:]

    monkeypatch.setattr(psutil, "wait_procs", wait)
    with pytest.raises(SignalException), module._ended_ranks(tmp_path) as left:
        raise SignalException("ended", signal.SIGTERM)
    assert done == ["ignores signals", 30.0, 2] and left == {143}
    # Nobody is waited for, and no code is read, if no signal has come.
    with module._ended_ranks(tmp_path) as left:
        pass
    assert len(done) == 3 and left == set()


def test_a_run_that_ends_well_leaves_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "codes"))
    given: list[Any] = []
    assert ended(monkeypatch, None, set()) == 0
    monkeypatch.setattr(module, "torchrun", given.extend)
    assert module.run_torchrun(["--standalone", "train.py"]) == 0
    assert given[-2:] == ["--standalone", "train.py"]
    assert not (tmp_path / "codes").exists()


def test_a_command_in_the_place_of_a_file_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "run_torchrun", lambda words: 7)
    assert module.main(["--nproc-per-node", "2", "ls", "--lr", "1"]) == 2
    assert capsys.readouterr().err == (
        "error: `ls` is a command, not a file of Python; give `--no-python` before it.\n"
    )
    for words in (["--no-python", "ls"], ["-m", "ls"], [__file__]):
        assert module.main(words) == 7
