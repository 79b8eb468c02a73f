"""The exit codes of a run, their meaning, and whether a restart makes sense after each.

``python -m megatron_ext.train.exit_codes CODE`` prints what a code means, and exits with 0 if a
scheduler should restart the job, else with 1. If MEGATRON_EXT_EXIT_CODES names a folder, the
codes that nodes have left there (`torchrun.run_torchrun`) are considered too (`code_of_nodes`).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from megatron_ext.errors import EXIT_CODE_INTERRUPTED, EXIT_CODE_NOT_SAVED

EXIT_CODE_USER_ERROR = 2
EXIT_CODE_NO_MEMORY = 120
"""Exit code of a rank that ran out of memory."""
EXIT_CODE_RESIZED = 121
"""Exit code of a rank that saved and exited so that the run can go on with another world size."""
EXIT_CODE_COMES_BACK = 122
"""Exit code of a run that met the same fault at the same step after several restarts in a row."""
EXIT_CODE_LOST_CONTACT = 123
"""Exit code of a rank that lost its connection to another rank."""
EXIT_CODE_NO_ANSWER = 124
"""Exit code of a rank that waited too long for another one, and of the shell's ``timeout``."""
EXIT_CODE_SIGNAL = 143
"""Exit code of a run that saved and stopped because of the exit signal (128 + SIGTERM).

Without ``--exit-signal-handler`` it is the shell's code for a run killed by SIGTERM.
"""

FOLDER_VARIABLE = "MEGATRON_EXT_EXIT_CODES"
"""Environment variable with the folder in which the nodes of a job leave their exit codes."""
FOLLOWS = (EXIT_CODE_NO_ANSWER, EXIT_CODE_LOST_CONTACT)
"""Exit codes of ranks that failed only because another rank did."""
FINAL = {
    0: "the run is complete",
    EXIT_CODE_USER_ERROR: "a flag, a file or a checkpoint must be corrected first",
    EXIT_CODE_COMES_BACK: "the same fault came back at the same step, so it is not transient",
    EXIT_CODE_INTERRUPTED: "it was interrupted from the keyboard",
}
"""Exit codes after which a restart would not help or is not wanted, each with its meaning."""
TRANSIENT = {
    1: "a rank raised an error",
    EXIT_CODE_NO_MEMORY: "a rank ran out of memory",
    EXIT_CODE_RESIZED: "it has saved, to go on with another number of replicas",
    EXIT_CODE_LOST_CONTACT: "a rank lost its connection to another one",
    EXIT_CODE_NO_ANSWER: "a rank did not answer",
    EXIT_CODE_NOT_SAVED: "it was asked to end, and could not save a checkpoint first",
    EXIT_CODE_SIGNAL: "it was asked to end, and with `--exit-signal-handler` has saved first",
}
"""Exit codes after which a restart can continue from the last checkpoint, each with its meaning."""


def code_of(status: int) -> int:
    """Return a shell's exit code for a process's status, which is negative after a signal."""
    return status if status >= 0 else 128 - status


def cause_of(status: int) -> str:
    """Return in a few words why a rank ended, such as "SIGKILL"; ``status`` is as for `code_of`."""
    if status < 0:
        return signal.Signals(-status).name
    names = {
        1: "exception",
        EXIT_CODE_NO_MEMORY: "memory",
        EXIT_CODE_LOST_CONTACT: "lost contact",
        EXIT_CODE_NO_ANSWER: "hang",
    }
    return names.get(status, f"exit code {status}")


def meaning_of(code: int) -> str:
    """Return a clause that says why a run with this exit code ended."""
    meanings = FINAL | TRANSIENT
    if code not in meanings and code > 128 and code - 128 in list(signal.Signals):
        return f"a rank was ended by {signal.Signals(code - 128).name}"
    return meanings.get(code, "a rank ended with this code")


def is_worth_a_start(code: int) -> bool:
    """Return whether a scheduler should restart a job that ended with this exit code."""
    return code not in FINAL


def code_of_nodes(code: int, folder: Path | None) -> int:
    """Return the exit code that best explains the end of a multi-node job.

    The candidates are ``code``, the launcher's, and those that nodes have left in ``folder``, if
    given; a node that ended only because of another one leaves none. A code after which a restart
    is useless is preferred; a code that only follows from another rank's failure is the last
    choice.
    """
    paths = [] if folder is None else sorted(folder.glob("*"))
    left = [int(path.read_text(encoding="utf-8")) for path in paths]
    return min((*left, code), key=lambda found: (is_worth_a_start(found), found in FOLLOWS))


def main(words: list[str]) -> int:
    """Print the meaning of an exit code, the only command-line argument in ``words``.

    Return 0 if a restart makes sense, 1 if not, and `EXIT_CODE_USER_ERROR` if ``words`` is not one
    number.
    """
    if len(words) != 1 or not words[0].isdecimal():
        print("usage: python -m megatron_ext.train.exit_codes CODE", file=sys.stderr)
        return EXIT_CODE_USER_ERROR
    folder = os.environ.get(FOLDER_VARIABLE)
    code = code_of_nodes(int(words[0]), None if folder is None else Path(folder))
    again = is_worth_a_start(code)
    advice = "worth another start" if again else "not worth another start"
    print(f"exit code {code}: {meaning_of(code)}; {advice}", flush=True)
    return int(not again)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
