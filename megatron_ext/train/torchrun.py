"""torchrun with an exit code that says why the run ended; torch's own always exits with 1.

``python -m megatron_ext.train.torchrun`` takes torchrun's arguments. If MEGATRON_EXT_EXIT_CODES
names a folder, each node stores its exit code there, unless its ranks ended only because of another
node.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ext.errors import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser
from torch.distributed.run import main as torchrun

from megatron_ext.disk.host_folder import exit_codes_left, shared_host_folder
from megatron_ext.disk.writing import write_text
from megatron_ext.errors import (
    EXIT_CODE_NOT_SAVED,
    STOP_SIGNALS,
    ignore_stop_signals,
    tell_errors,
)
from megatron_ext.train.exit_codes import (
    EXIT_CODE_RESIZED,
    EXIT_CODE_SIGNAL,
    EXIT_CODE_USER_ERROR,
    FOLDER_VARIABLE,
    FOLLOWS,
    code_of,
)

_PASSED_ON = "--signals-to-handle"
_SECONDS_FOR_RANKS = 30.0
"""Seconds until ranks are killed that still run when torch's agent has been ended by a signal."""


def run_torchrun(words: Sequence[str]) -> int:
    """Run torchrun, and return 0 or the exit code of the rank that failed by itself.

    If a signal ended torchrun, which passes it on to its ranks, return 0 or `EXIT_CODE_SIGNAL` if
    the ranks have finished or saved, or else the code of a rank that the signal ended. The failure
    is printed. The host folder, shared by the processes of this machine, is removed at the end.
    """
    try:
        with shared_host_folder() as folder, _ended_ranks(folder) as left:
            torchrun([*_passing_signals_on(), *words])
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        by_time = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        codes = [code_of(failure.exitcode) for failure in by_time]
        code = next((code for code in codes if code not in FOLLOWS), codes[0])
        if job_folder := os.environ.get(FOLDER_VARIABLE):
            own = Path(job_folder) / f"{socket.gethostname()}_{os.getpid()}"
            own.parent.mkdir(parents=True, exist_ok=True)
            write_text(own, str(code))
        return code
    except SignalException as error:
        if 0 in left:
            return 0
        if not left.isdisjoint((EXIT_CODE_SIGNAL, EXIT_CODE_RESIZED)):
            return EXIT_CODE_SIGNAL
        is_to_save = EXIT_CODE_NOT_SAVED in left or "--exit-signal-handler" in words
        if is_to_save and error.sigval == signal.SIGTERM:
            return EXIT_CODE_NOT_SAVED
        return code_of(-int(error.sigval))
    return 0


def _passing_signals_on() -> list[str]:
    """Return the flag that makes torch's agent pass all of `STOP_SIGNALS` on to its ranks.

    Other signals kill the agent but not its ranks. Return [] if torch is too old for the flag.
    """
    if _PASSED_ON not in get_args_parser().format_usage():
        return []
    return [f"{_PASSED_ON}={','.join(number.name for number in STOP_SIGNALS)}"]


@contextmanager
def _ended_ranks(folder: Path | None) -> Iterator[set[int]]:
    """Yield an empty set, to which the ranks' exit codes are added if a signal ends torch's agent.

    The ranks leave their codes in ``folder``; if it is None, none are added. On such a signal, the
    context ignores further ones, waits for the ranks (torch itself may have given up waiting), and
    kills those that still run after `_SECONDS_FOR_RANKS`.
    """
    left: set[int] = set()
    try:
        yield left
    except SignalException:
        ignore_stop_signals()
        running = psutil.wait_procs(psutil.Process().children(), _SECONDS_FOR_RANKS)[1]
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if folder is not None:
            left.update(exit_codes_left(folder))
        raise


def main(words: Sequence[str]) -> int:
    """Run torchrun as `run_torchrun` does, unless it would take a command for a file."""
    options = get_args_parser().parse_args([*words])
    program = options.training_script
    runs_python = not (options.no_python or options.module)
    if runs_python and not os.path.exists(program) and shutil.which(program) is not None:
        tell_errors(
            [f"`{program}` is a command, not a file of Python; give `--no-python` before it."]
        )
        return EXIT_CODE_USER_ERROR
    return run_torchrun(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
