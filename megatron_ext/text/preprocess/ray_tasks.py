"""Encodes the parts of a run as tasks of Ray, on machines that share its file system.

Ray starts a task again whose process or machine dies. A process of Ray's loads the tokenizer once,
for all tasks of a run that it gets.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError, MachineFault, MegatronExtError
from megatron_ext.text.preprocess.inputs import Part
from megatron_ext.text.preprocess.jobs import (
    ATTEMPTS,
    SECONDS_FOR_FILES,
    Build,
    Job,
    Say,
    StopAtLine,
    bad_line,
    encode_part,
    unfinished,
)
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import read_marker
from megatron_ext.text.preprocess.progress import Progress
from megatron_ext.text.tokenizers.fast import InexactEngine

_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class _Setting:
    """The values from which a process of Ray's makes its job."""

    options: PreprocessOptions
    folder: Path
    key: str
    parts: Sequence[Part]
    build: Build
    fast: bool
    cwd: str


_jobs: dict[str, Job] = {}
"""The job that this process of Ray's works on, by the key of its plan."""


def encode_here(key: str, setting: list[Any], number: int) -> None:
    """Encode one part in a task; ``setting`` holds a reference, which is read once a process."""
    import ray

    if key not in _jobs:
        given: _Setting = ray.get(setting[0])
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        os.chdir(given.cwd)
        encoding = given.build(given.options)
        encoder = encoding.encoder(fast=given.fast)
        _jobs.clear()
        _jobs[key] = Job(
            given.options, given.folder, given.key, given.parts, encoding, encoder, given.build,
            given.fast,
        )  # fmt: skip
    encode_part(_jobs[key], number, lambda _read, _documents: None)


def _task_of(root: str) -> Callable[..., None]:
    """Return the function of a task, which imports this package from the folder ``root``.

    Ray sends it as code, because its processes know the paths of this one only in part.
    """

    def encode(key: str, setting: list[Any], number: int) -> None:
        import sys

        if root not in sys.path:
            sys.path.insert(0, root)
        from megatron_ext.text.preprocess import ray_tasks

        ray_tasks.encode_here(key, setting, number)

    return encode


def encode_by_ray(job: Job, todo: Sequence[int], say: Say) -> None:
    """Encode the parts with the numbers ``todo`` in tasks, ``--workers`` at a time.

    The cluster is the one that `RAY_ADDRESS` names or that runs on this machine; without one, Ray
    is started here for the time of the run.

    Raises:
        ConfigError: Ray is not installed, or its cluster is not found.
        DataError: a bad line, or a damaged file.
        MachineFault: the processes of a part have died too often, or a disk failed.
        InexactEngine: the fast engine gives other ids than the tokenizer.
    """
    ray, ours = _connect(job.options.workers, say)
    progress = Progress(job.parts, todo, job.options.log_interval)
    running: dict[Any, int] = {}
    try:
        setting = _Setting(
            job.options, job.folder, job.key, job.parts, job.build, job.fast, os.getcwd()
        )
        shared = [ray.put(setting)]
        task = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1, retry_exceptions=[OSError])(
            _task_of(str(Path(__file__).resolve().parents[3]))
        )
        waiting, done, documents = list(reversed(todo)), 0, 0
        while waiting or running:
            while waiting and len(running) < job.options.workers:
                number = waiting.pop()
                running[task.remote(job.key, shared, number)] = number
            finished, _ = ray.wait(list(running), timeout=_SECONDS_BETWEEN_LOOKS)
            for reference in finished:
                number = running.pop(reference)
                _check(ray, reference, job.parts[number])
                marker = read_marker(job.folder, job.key, number)
                done += job.parts[number].num_bytes
                documents += marker.documents if marker else 0
            progress.show(done, documents)
        until = time.monotonic() + SECONDS_FOR_FILES
        while unfinished(job, todo) and time.monotonic() < until:
            time.sleep(0.5)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        progress.close()
        if ours:
            ray.shutdown()


def _connect(workers: int, say: Say) -> tuple[Any, bool]:
    """Return the module ray, connected to a cluster, and whether this call has connected it."""
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
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError as error:
        address = os.environ.get("RAY_ADDRESS")
        if address:
            raise ConfigError(
                f"`RAY_ADDRESS` ({address}) leads to no Ray cluster ({error}); start it, or unset "
                "the variable to use this machine."
            ) from None
        say(f"No Ray cluster runs here; starting one of {workers} CPUs on this machine.")
        ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
    return ray, True


def _check(ray: Any, reference: Any, part: Part) -> None:
    """Raise the error of a task, if any, as an error of ours."""
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, StopAtLine):
            raise bad_line(cause, part) from None
        if isinstance(cause, (InexactEngine, MegatronExtError)):
            raise cause from None
        if isinstance(cause, OSError):
            why = f"A worker could not write or read: {cause}; free space and rerun."
            raise MachineFault(why) from None
        raise RuntimeError(f"A worker failed:\n{error}") from None
    except ray.exceptions.RayError as error:
        raise MachineFault(
            f"A Ray process died in each of {ATTEMPTS} attempts at {part} "
            f"({' '.join(str(error).split())[:200]}); finished parts are kept, so run the same "
            "command again."
        ) from None
