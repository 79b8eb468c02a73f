"""torchrun with an exit code that says why the run has ended; torch's own always ends with 1.

``python -m megatron_ext.train.torchrun`` takes the words of torchrun. Where the environment
variable MEGATRON_EXT_EXIT_CODES names a folder, each node whose ranks have ended by themselves, and
not because another node did, leaves its exit code there.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from megatron_ext.disk.writing import write_text
from megatron_ext.faults.host import shared_host_folder
from megatron_ext.train.exit_codes import FOLDER_VARIABLE, FOLLOWS, code_of


def run_torchrun(words: Sequence[str]) -> int:
    """Run torchrun, and return 0 or the exit code of the rank that has failed by itself.

    torchrun itself prints what has failed. After a signal to torchrun the code is 128 plus its
    number, as of a shell. The host folder ends with this process, also after a failure.
    """
    try:
        with shared_host_folder():
            torchrun(list(words))
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        by_time = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        codes = [code_of(failure.exitcode) for failure in by_time]
        code = next((code for code in codes if code not in FOLLOWS), codes[0])
        if folder := os.environ.get(FOLDER_VARIABLE):
            own = Path(folder) / f"{socket.gethostname()}_{os.getpid()}"
            own.parent.mkdir(parents=True, exist_ok=True)
            write_text(own, str(code))
        return code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(run_torchrun(sys.argv[1:]))
