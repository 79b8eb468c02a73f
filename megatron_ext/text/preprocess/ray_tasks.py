"""Encodes the parts of the input in Ray tasks: one part per task, `--workers` tasks at a time.

A part is a piece of the input. A Ray process loads the tokenizer once, for all its tasks of a run.
"""

import os
import re
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError
from megatron_ext.text.preprocess.cluster import save_job
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.jobs import Job, Say

_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_CANCEL = 10.0
_SECONDS_TO_CONNECT = 10.0
_LENGTH_OF_REASON = 200
_ROOT = str(Path(__file__).resolve().parents[3])
_PATIENCE = "RAY_gcs_server_port_wait_time_s"
"""The environment variable for the number of times that Ray tries to reach a cluster.

Each try takes 40 seconds; Ray's default is 20 tries.
"""


class RayTasks:
    """Encodes the parts of a job in Ray tasks, up to `--workers` at a time.

    The tasks run on the Ray cluster at the address in `RAY_ADDRESS`. If this is not set, they run
    on the cluster to which this machine belongs. If there is no such cluster, or if `RAY_ADDRESS`
    is "local", Ray is started on this machine and stopped when the run ends. If this process is
    connected to Ray already, that connection is used instead.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be used.
    """

    def __init__(self, job: Job, _todo: Sequence[int], say: Say) -> None:
        save_job(job)
        self._job = job
        self._ray, self._ours = _connect(job.options.workers, say)
        # Ray must not retry tasks itself: it would silently retry forever a task that it killed for
        # lack of memory.
        self._task = self._ray.remote(num_cpus=1, max_retries=0)(_task_of(_ROOT))
        self._waiting = deque[int]()
        self._running: dict[Any, int] = {}
        self._faults: dict[int, str] = {}

    def submit(self, numbers: Sequence[int]) -> None:
        self._waiting.extend(numbers)
        self._faults.clear()

    def running(self, left: Sequence[int]) -> bool:
        folder = os.path.abspath(self._job.folder)
        until = time.monotonic() + _SECONDS_BETWEEN_LOOKS
        while time.monotonic() < until:
            while self._waiting and len(self._running) < self._job.options.workers:
                number = self._waiting.popleft()
                self._running[self._task.remote(folder, self._job.key, number)] = number
            if not self._running:
                return False
            finished, _ = self._ray.wait(list(self._running), timeout=_SECONDS_BETWEEN_LOOKS)
            for reference in finished:
                number = self._running.pop(reference)
                if fault := _fault(self._ray, reference, self._job.parts[number]):
                    self._faults[number] = fault
        return True

    def faults(self, left: Sequence[int]) -> tuple[list[str], bool]:
        unknown = "A Ray process has left no marker for"
        clauses = [self._faults.get(i, f"{unknown} {self._job.parts[i]}") for i in left]
        return clauses, not self._faults.keys() >= set(left)

    def close(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        if self._running:  # The caller may remove the work directory: nobody must write there now.
            references = list(self._running)
            self._ray.wait(references, num_returns=len(references), timeout=_SECONDS_TO_CANCEL)
        if self._ours:
            self._ray.shutdown()


def _task_of(root: str) -> Callable[..., str]:
    """Return the function that a Ray task runs; it imports this package from the folder ``root``.

    The function is nested, so that Ray pickles its code instead of its name: other processes may
    lack this process's import paths. It imports the module `task` when it runs, because `task`
    (through `run`) imports this module.
    """

    def encode(folder: str, key: str, number: int) -> str:
        import importlib
        import sys

        if root not in sys.path:
            sys.path.insert(0, root)
        task = importlib.import_module("megatron_ext.text.preprocess.task")
        reason: str = task.encode_by_ray(folder, key, number)
        return reason

    return encode


def _connect(workers: int, say: Say) -> tuple[Any, bool]:
    """Connect to a Ray cluster, or start Ray on this machine with ``workers`` CPUs.

    If this process is connected already, keep that connection. Return (the module ``ray``, whether
    this call has made the connection).
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
    """Connect to the running Ray cluster at ``address``, the value of `RAY_ADDRESS`; return True.

    If ``address`` is "", this machine's cluster is meant; return False if there is none. Raise a
    ConfigError if a cluster cannot be used, or if none runs at a given address. ``quiet`` holds
    arguments of `ray.init` that silence Ray's log.
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
    """Raise an OSError if no program listens at ``address``, of the form host:port.

    Ray itself would wait for minutes. An address of another form, such as "auto", is not checked.
    """
    match = re.fullmatch(r"(ray://)?\[?([^/\[\]]+)\]?:(\d+)", address)
    if match:
        client, host, port = match.groups()
        if not client and host in ("localhost", "127.0.0.1", "::1"):
            host = ray.util.get_node_ip_address()  # Ray replaces local names in the same way.
        socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()


def _fault(ray: Any, reference: Any, part: Part) -> str:
    """Return why a Ray task could not encode its part, as a phrase for an error; "" if it could.

    ``reference`` is Ray's handle of the ended task. Raise an error if another attempt would fail in
    the same way.
    """
    try:
        reason = ray.get(reference)
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
    if not reason:
        return ""
    return (
        f"A Ray process could not write or read ({reason}) for {part}, as where a disk is full, or "
        "a machine does not share these folders"
    )
