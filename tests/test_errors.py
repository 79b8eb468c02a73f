"""Errors are sentences that know their flags, and programs end as their callers expect."""

import copy
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext import errors
from megatron_ext.errors import (
    EXIT_CODE_BROKEN_PIPE,
    STOP_SIGNALS,
    CheckpointError,
    ConfigError,
    FlagError,
    MegatronExtError,
    end_on_interrupt,
    end_with_parent,
    exclusive,
    flags_of,
    interrupt_once,
    loader_ends_with_parent,
    parent_at_start,
    pass_over,
    run_program,
    say_to_stderr,
    tell_errors,
)

LOAD = ("--load", "runs/`--lr` x", "holds no checkpoint", "leave `--load` or `--save 1` out")


@pytest.mark.parametrize(
    ("parts", "sentence", "flags"),
    [
        (
            ("--min-lr", 0.1, "must be at most `--lr` (0.01)", "use 0.001"),
            "`--min-lr` (0.1) must be at most `--lr` (0.01); use 0.001.",
            {"--min-lr", "--lr"},
        ),
        (("--lr", None, "is missing"), "`--lr` is missing.", {"--lr"}),
        (("--split", "", "is empty"), "`--split` () is empty.", {"--split"}),
        (
            ("--loss-args", "a", "is unknown", "did you mean b?"),
            "`--loss-args` (a) is unknown; did you mean b?",
            {"--loss-args"},
        ),
        (
            ("--optimizer sgd", None, "does not go with `--use-distributed-optimizer`"),
            "`--optimizer sgd` does not go with `--use-distributed-optimizer`.",
            {"--optimizer", "--use-distributed-optimizer"},
        ),
        (
            ("The number of ranks", 3, "must be divisible by `--tensor-model-parallel-size` (2)"),
            "The number of ranks (3) must be divisible by `--tensor-model-parallel-size` (2).",
            {"--tensor-model-parallel-size"},
        ),
        (
            LOAD,
            "`--load` (runs/`--lr` x) holds no checkpoint; leave `--load` or `--save 1` out.",
            {"--load", "--save"},
        ),
    ],
)
def test_a_sentence_names_flag_value_rule_and_remedy(
    parts: tuple[str, object, str, str], sentence: str, flags: set[str]
) -> None:
    error = FlagError(*parts)
    assert str(error) == sentence
    assert set(error.flags) == flags


def test_flags_that_exclude_each_other_are_named_with_the_values_given() -> None:
    error = exclusive(("--train-iters", 5), "--train-samples", remedy="give either")
    assert error == "`--train-iters` (5) and `--train-samples` exclude each other; give either."
    assert error.flags == {"--train-iters", "--train-samples"}


def test_a_plain_sentence_is_about_no_flag() -> None:
    assert flags_of("`--lr` (1) is large.") == set()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_keeps_the_parts(copied: Callable[[CheckpointError], CheckpointError]) -> None:
    error = copied(CheckpointError([FlagError(*LOAD), "Another."]))
    assert error.messages == (FlagError(*LOAD), "Another.")
    first = error.messages[0]
    assert isinstance(first, FlagError)
    assert (first.subject, first.value, first.rule, first.remedy) == ("`--load`", *LOAD[1:])
    assert first.flags == {"--load", "--save"}


def test_an_exception_about_a_flag_is_of_its_class() -> None:
    error = ConfigError.about("--lr", None, "is missing")
    assert isinstance(error, MegatronExtError)
    assert isinstance(error, ConfigError)
    assert str(error) == "`--lr` is missing."
    assert flags_of(error.messages[0]) == {"--lr"}


def test_a_note_stands_at_the_end_of_the_sentence() -> None:
    noted = FlagError(*LOAD).with_note("`--load` was given as `--resume`")
    assert noted.endswith("`--save 1` out (`--load` was given as `--resume`).")
    assert noted.value == LOAD[1]
    assert FlagError("--lr", 1, "is large").with_note("so") == "`--lr` (1) is large (so)."


def test_a_renamed_flag_is_renamed_everywhere_but_in_the_value() -> None:
    error = FlagError("--a", "`--a`", "needs `--b` and `--a-b`, not `--a`", "leave `--a` out")
    renamed = error.renamed("--a", "--c")
    assert renamed == "`--c` (`--a`) needs `--b` and `--a-b`, not `--c`; leave `--c` out."
    assert renamed.flags == {"--c", "--b", "--a-b"}


def ended(code: int | None) -> int:
    """Return the status of a forked process that runs a program which exits with ``code``."""
    pid = os.fork()
    if pid == 0:
        try:
            run_program(lambda argv: sys.exit(code))
        except SystemExit as end:
            os._exit(0 if end.code is None else int(end.code))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_program_exits_with_the_code_that_it_asks_for() -> None:
    assert [ended(code) for code in (None, 0, 3)] == [0, 0, 3]


def test_a_pipe_that_breaks_elsewhere_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Only a reader of the output that has gone is no error."""
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    reader, writer = os.pipe()
    try:

        def main(_: list[str]) -> int:
            raise BrokenPipeError

        with os.fdopen(writer, "w") as out, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            with pytest.raises(BrokenPipeError):
                run_program(main)
            os.close(reader)
            with pytest.raises(SystemExit) as end:
                run_program(main)
    finally:
        signal.signal(signal.SIGINT, before[0])
        sys.unraisablehook = before[1]
    assert end.value.code == EXIT_CODE_BROKEN_PIPE == 141


def test_what_is_said_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say_to_stderr("a line")
    assert capsys.readouterr() == ("", "a line\n")


def in_child(work: Callable[[], bool]) -> bool:
    """Return the answer of ``work`` in a forked process."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_parent_of_a_forked_process_is_the_one_that_forked_it() -> None:
    here = os.getpid()
    assert parent_at_start() == os.getppid()
    assert in_child(lambda: parent_at_start() == here)


def test_a_process_ends_at_once_if_its_parent_has_ended_already() -> None:
    here = os.getpid()

    def follows(parent: int) -> bool:
        end_with_parent(parent)
        return True

    assert in_child(lambda: follows(here))
    assert not in_child(lambda: follows(os.getpid()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_signal_with_which_a_process_ends_with_its_parent(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "ctypes.CDLL", lambda _: SimpleNamespace(prctl=lambda *words: asked.append(words))
    )
    end_with_parent(os.getppid(), number)
    assert asked == [(1, number)]


def test_workers_of_a_loader_leave_signals_to_the_process_that_started_them() -> None:
    """A worker of a fork server has another parent, and keeps its handlers."""
    start = loader_ends_with_parent()

    def ignores() -> bool:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        start(0)
        return all(signal.getsignal(number) is pass_over for number in STOP_SIGNALS)

    assert in_child(ignores)
    assert in_child(lambda: not in_child(ignores))


def test_signals_that_a_background_job_ignores_stay_ignored() -> None:
    def stays() -> bool:
        for prepare in (end_on_interrupt, interrupt_once):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            prepare()
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                return False
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            prepare()
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
                return False
        return True

    assert in_child(stays)


class _Interrupted:
    def __del__(self) -> None:
        raise KeyboardInterrupt


class _Broken:
    def __del__(self) -> None:
        raise ValueError("of another kind")


def test_an_interruption_that_a_destructor_would_swallow_ends_the_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def survives(kind: type) -> bool:
        sys.unraisablehook = errors._on_unraisable
        kind()
        return True

    assert in_child(lambda: survives(_Broken))
    assert "of another kind" in capfd.readouterr().err
    assert not in_child(lambda: survives(_Interrupted))
    assert capfd.readouterr().err == "interrupted\n"


def test_sigterm_lets_an_interrupted_program_clean_up() -> None:
    """After Ctrl-C, torchrun sends SIGTERM as well."""

    def cleans_up() -> bool:
        # A shell starts what it runs in the background with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt_once()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            return True
        return False

    assert in_child(cleans_up)


def test_a_broken_package_of_kernels_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flash_attn.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    end_on_interrupt()
    with pytest.raises(OSError, match="undefined") as caught:
        import_module("flash_attn")
    sys.excepthook(OSError, caught.value, caught.tb)
    told = capsys.readouterr().err
    assert told.startswith(
        "error: The package flash_attn is installed but cannot be imported (OSError: undefined "
        "symbol), and"
    )
    assert told.endswith("or run `pip uninstall flash-attn`.\n")
    sys.excepthook(OSError, OSError("of another kind"), None)
    assert "Error: of another kind" in capsys.readouterr().err


def test_a_worker_of_a_loader_is_silent_when_its_parent_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    loader_ends_with_parent()(0)
    for error in (ConnectionResetError(), EOFError()):
        sys.excepthook(type(error), error, None)
    assert not capsys.readouterr().err
    sys.excepthook(ValueError, ValueError("of another kind"), None)
    assert "ValueError: of another kind" in capsys.readouterr().err


def test_errors_are_broken_between_words_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    sentence = "`--some-long-flag-that-must-stay-whole` " + "word " * 30 + "end."
    tell_errors([sentence, "short."])
    assert capsys.readouterr().err == f"error: {sentence}\nerror: short.\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tell_errors([sentence, "short."])
    lines = capsys.readouterr().err.splitlines()
    assert 90 < max(map(len, lines)) <= errors.WIDEST_LINE
    assert lines[-1] == "error: short." and lines[1].startswith("  word")
    assert " ".join(line.strip() for line in lines[:-1]) == f"error: {sentence}"
