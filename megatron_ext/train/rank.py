"""The process of a rank: its environment, its threads, and how it ends.

Ranks that are forked, started by torchrun or alone in their run end in the same way.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_ext import limits
from megatron_ext.errors import EXIT_CODE_INTERRUPTED, MachineFault, MegatronExtError
from megatron_ext.train.exit_codes import (
    EXIT_CODE_LOST_CONTACT,
    EXIT_CODE_NO_ANSWER,
    EXIT_CODE_NO_MEMORY,
    EXIT_CODE_USER_ERROR,
)

_SECONDS_FOR_RANK_0_OF_A_RUN = 1.0
"""Seconds that other ranks wait before they print an error of the run's flags or files."""

_WITHOUT_MEMORY = (
    "Memory ran out. A smaller `--micro-batch-size` takes less, and so do "
    "`--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`, shorter "
    "samples, or a model cut over more ranks; `python tools/plan.py --world-size N --search -- "
    "FLAGS` lists the layouts that fit."
)

Main = Callable[[], "int | None"]
Tell = Callable[[int], None]
"""A function that a run calls once with its exit code, when it has ended or is about to."""


def tell_nothing(_code: int) -> None:
    """Do nothing; this is the `Tell` of a run of which nobody wants to know."""


def environment_of(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables that tell a process which rank it is, all ranks on this machine."""
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes}


def threads_of_rank(num_ranks: int) -> int:
    """Return the number of threads that each of ``num_ranks`` ranks on this machine computes with.

    This holds on CPUs unless OMP_NUM_THREADS says otherwise.
    """
    return max(1, (os.cpu_count() or 1) // num_ranks)


@dataclass
class End:
    """Holds the exit code with which a launch or a rank ends; 1 unless it is set."""

    exit_code: int = 1


@contextmanager
def rank_end() -> Iterator[End]:
    """Yield an `End` for the rank that runs in this context; set its exit code after an error.

    The error is printed with the rank's number: as a sentence if it is a MegatronExtError or caused
    by another rank's failure, otherwise with its traceback. If all ranks raise the same
    MegatronExtError, rank 0 prints it first, and its exit ends the others. An interruption is not
    printed, since all ranks and their launcher receive it.
    """
    end = End(exit_code=0)
    try:
        yield end
        return
    except MegatronExtError as error:
        message = str(error)
        end.exit_code = 1 if isinstance(error, MachineFault) else EXIT_CODE_USER_ERROR
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_SECONDS_FOR_RANK_0_OF_A_RUN)
    except KeyboardInterrupt:
        tell_torchrun("interrupted")
        end.exit_code = EXIT_CODE_INTERRUPTED
        return
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        from megatron_ext.parallel.context import NoAnswer, contact_fault

        fault = contact_fault(error)
        message = limits.sentence(error) or traceback.format_exc()
        end.exit_code = 1
        if _lacks_memory(error):
            message = f"{message.rstrip()}\n{_WITHOUT_MEMORY}"
            end.exit_code = EXIT_CODE_NO_MEMORY
        if fault is not None:
            message = fault.value
            timed_out = fault is NoAnswer.TIMEOUT
            end.exit_code = EXIT_CODE_NO_ANSWER if timed_out else EXIT_CODE_LOST_CONTACT
    # A single write keeps the text together, since other ranks print too.
    text = f"[rank {os.environ.get('RANK', '0')}] {message}"
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    tell_torchrun(text)


def run_rank(main: Main) -> int:
    """Run one rank, and return its exit code; see `rank_end`."""
    with rank_end() as end:
        end.exit_code = main() or 0
    return end.exit_code


def _lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a GPU or in this process.

    torch's allocator of main memory raises a plain RuntimeError, so only its text tells. Other
    errors may follow, so the errors that preceded this one are examined too.
    """
    import torch

    text = "can't allocate memory"
    before = error.__context__
    lacks = isinstance(error, MemoryError | torch.OutOfMemoryError) or text in str(error)
    return lacks or (before is not None and _lacks_memory(before))


def tell_torchrun(message: str) -> None:
    """Write an error to torchrun's error file for its summary, if torchrun started this process."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        shown = {"py_callstack": message, "timestamp": str(int(time.time()))}
        text = json.dumps({"message": {"message": message, "extraInfo": shown}})
        Path(path).write_text(text, encoding="utf-8")


def leave(code: int) -> None:
    """Flush the output, and exit with ``code`` without waiting for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
