"""Encodes the parts of a run as tasks of Ray, on machines that share its file system.

A process of Ray loads the tokenizer once, for all tasks of a run that it gets.
"""

import os
import pickle
import re
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.data.part_pool import ATTEMPTS
from megatron_ext.data.progress import Progress
from megatron_ext.errors import ConfigError, MachineFault, MegatronExtError
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.jobs import (
    SECONDS_FOR_FILES,
    Build,
    Job,
    Say,
    StopAtLine,
    bad_line,
    encode_part,
    progress_of,
    unfinished,
)
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import read_marker
from megatron_ext.text.tokenizers.fast import InexactEngine

_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_CANCEL = 10.0
_SECONDS_TO_CONNECT = 10.0
_LENGTH_OF_REASON = 200
_ROOT = str(Path(__file__).resolve().parents[3])
_PATIENCE = "RAY_gcs_server_port_wait_time_s"
"""The variable that sets how often Ray tries to reach a cluster, 40 seconds each; 20 by default."""


@dataclass(frozen=True)
class _Setting:
    """The values from which a process of Ray makes its job."""

    options: PreprocessOptions
    folder: Path
    key: str
    parts: Sequence[Part]
    build: Build
    fast: bool
    cwd: str


_jobs: dict[str, Job] = {}
"""The job of this process of Ray, keyed by the key of its plan."""


def encode_here(key: str, setting: list[Any], number: int) -> bytes:
    """Encode one part in a task of Ray; return b"", or the pickled error that ended it.

    ``setting`` holds a Ray reference to a pickled `_Setting`. It is in a list, because Ray would
    fetch a bare reference for each task; here each process fetches it once.
    """
    import ray

    try:
        if key not in _jobs:
            made_from: _Setting = pickle.loads(ray.get(setting[0]))
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            os.chdir(made_from.cwd)
            encoding = made_from.build(made_from.options)
            encoder = encoding.encoder(fast=made_from.fast)
            _jobs.clear()
            _jobs[key] = Job(
                made_from.options, made_from.folder, made_from.key, made_from.parts, encoding,
                encoder, made_from.build, made_from.fast,
            )  # fmt: skip
        encode_part(_jobs[key], number, lambda _read, _documents: None)
    except (StopAtLine, InexactEngine, MegatronExtError, OSError) as error:
        return pickle.dumps(error)
    return b""


def _task_of(root: str) -> Callable[..., bytes]:
    """Return the function that a task runs; it imports this package from the folder ``root``.

    Ray's processes may lack this process's import paths, so the function must be sent as code, not
    by its name: hence the nested function. Settings and errors are sent as pickled bytes for the
    same reason, since a server of Ray unpickles other values.
    """

    def encode(key: str, setting: list[Any], number: int) -> bytes:
        import sys

        if root not in sys.path:
            sys.path.insert(0, root)
        from megatron_ext.text.preprocess import ray_tasks

        return ray_tasks.encode_here(key, setting, number)

    return encode


def encode_by_ray(job: Job, todo: Sequence[int], say: Say) -> None:
    """Encode the parts with the numbers ``todo`` in tasks of Ray, ``--workers`` at a time.

    The cluster is the one that `RAY_ADDRESS` names, or the one that runs on this machine. If there
    is none, start Ray on this machine for the time of the run. If the process of a part dies, or
    cannot read or write, the part is encoded again after the others, ``ATTEMPTS`` times in all.

    Raises:
        ConfigError: Ray is not installed, or its cluster is not found.
        DataError: a bad line, or a damaged file.
        MachineFault: a part has failed in all its attempts.
        InexactEngine: the fast engine gives other ids than the tokenizer.
    """
    ray, ours = _connect(job.options.workers, say)
    progress = progress_of(job, todo)
    running: dict[Any, int] = {}
    try:
        _encode_all(ray, job, todo, running, progress, say)
        until = time.monotonic() + SECONDS_FOR_FILES
        while unfinished(job, todo) and time.monotonic() < until:
            time.sleep(0.5)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        if running:  # The caller may remove the work directory, so nobody must write there now.
            ray.wait(list(running), num_returns=len(running), timeout=_SECONDS_TO_CANCEL)
        progress.close()
        if ours:
            ray.shutdown()


def _encode_all(
    ray: Any, job: Job, todo: Sequence[int], running: dict[Any, int], progress: Progress, say: Say
) -> None:
    """Encode parts in tasks.

    ``running`` maps each running task to the number of its part; it is changed in place, so that
    the caller can cancel the tasks after an error.
    """
    task = _task(ray, job)
    waiting = deque(todo)
    faults = Counter[int]()
    done = documents = 0
    while waiting or running:
        while waiting and len(running) < job.options.workers:
            number = waiting.popleft()
            running[task(number)] = number
        finished, _ = ray.wait(list(running), timeout=_SECONDS_BETWEEN_LOOKS)
        for reference in finished:
            number = running.pop(reference)
            fault = _fault(ray, reference, job.parts[number])
            if fault is None:
                marker = read_marker(job.folder, job.key, number)
                done += job.parts[number].num_bytes
                documents += marker.documents if marker else 0
                continue
            faults[number] += 1
            if faults[number] == ATTEMPTS:
                raise MachineFault(
                    f"{fault}, as in each of {ATTEMPTS} attempts; finished parts are kept, so mend "
                    "this and run the same command again."
                )
            say(f"{fault}; it is encoded again (attempt {faults[number] + 1}).")
            waiting.append(number)
        progress.show(done, documents)


def _task(ray: Any, job: Job) -> Callable[[int], Any]:
    """Return a function that starts the task of a part.

    Ray must not retry tasks itself: it would silently retry forever a task that it killed for lack
    of memory.
    """
    setting = _Setting(
        job.options, job.folder, job.key, job.parts, job.build, job.fast, os.getcwd()
    )
    shared = [ray.put(pickle.dumps(setting))]
    encode = ray.remote(num_cpus=1, max_retries=0)(_task_of(_ROOT))
    return lambda number: encode.remote(job.key, shared, number)


def _connect(workers: int, say: Say) -> tuple[Any, bool]:
    """Connect to a cluster, or start Ray here; return the module ray, and whether it was connected.

    It was not if it had been connected before.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "`--executor ray` needs the package ray, which is not installed; run `pip install "
            "ray`, or leave `--executor` out."
        ) from None
    if ray.is_initialized():
        return ray, False
    quiet = {"log_to_driver": False, "logging_level": "error"}
    address = os.environ.get("RAY_ADDRESS", "")
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address == "local" or not _joined(ray, address, quiet):
            say(
                f"Starting Ray with {workers} CPUs on this machine; `RAY_ADDRESS` names no cluster."
            )
            ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
    finally:
        signal.signal(signal.SIGTERM, before)  # Ray has replaced it by a handler of its own.
    return ray, True


def _joined(ray: Any, address: str, quiet: dict[str, Any]) -> bool:
    """Connect to a running cluster; return False if ``address`` is "" and none runs here.

    Raise a ConfigError if the cluster that `RAY_ADDRESS` names cannot be used.
    """
    bounded = _PATIENCE not in os.environ
    try:
        _knock(ray, address)
        if bounded:
            os.environ[_PATIENCE] = "1"
        ray.init(address="auto", **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        if not address and isinstance(error, ConnectionError):
            return False
        what = f"`RAY_ADDRESS` ({address})" if address else "The Ray cluster of this machine"
        raise ConfigError(
            f"{what} leads to no Ray cluster that can be used "
            f"({' '.join(str(error).split())[:_LENGTH_OF_REASON]}); start it, set "
            "`RAY_AUTH_MODE=token` if it asks for a token, or set `RAY_ADDRESS=local` to use this "
            "machine alone."
        ) from None
    finally:
        if bounded:
            os.environ.pop(_PATIENCE, None)
    return True


def _knock(ray: Any, address: str) -> None:
    """Raise an OSError if nobody listens at an address of the form host:port.

    Ray itself would wait for minutes. Do not check other forms of an address, such as "auto".
    """
    match = re.fullmatch(r"(ray://)?\[?([^/\[\]]+)\]?:(\d+)", address)
    if match:
        client, host, port = match.groups()
        if not client and host in ("localhost", "127.0.0.1", "::1"):
            host = ray.util.get_node_ip_address()  # Ray replaces local names in the same way.
        socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()


def _fault(ray: Any, reference: Any, part: Part) -> str | None:
    """Return None if a task has succeeded, or the reason why its part must be encoded again.

    Raise the error of the task if another attempt would end in the same way.
    """
    try:
        pickled = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ImportError):
            raise ConfigError(
                f"A Ray process could not import what it needs ({error.cause}); let all machines "
                f"share {_ROOT}, and install the same packages on each."
            ) from None
        raise RuntimeError(f"A worker failed:\n{error}") from None
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).split())[:_LENGTH_OF_REASON]
        return f"A Ray process died at {part} ({reason})"
    if not pickled:
        return None
    ended_by = pickle.loads(pickled)
    if isinstance(ended_by, OSError):
        return (
            f"A Ray process could not write or read ({ended_by}) for {part}, as where a disk is "
            "full, or a machine does not share these folders"
        )
    raise bad_line(ended_by, part) if isinstance(ended_by, StopAtLine) else ended_by
