"""A process beside each rank that writes the rank's part of checkpoints while the rank trains.

The rank copies its part to memory that this process maps (`snapshot`), and sends a `Job`. Helpers
do not communicate with each other: each leaves its result in the folder of the checkpoint. The
helper of rank 0 waits for all results, up to a time limit, and then publishes the checkpoint. So a
helper that fails or hangs cannot stop the training.

A helper that has died is replaced by a new process, which gets the same job. So each step of a job
must be safe to repeat.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.utils._pytree import tree_map_only

from megatron_ext.checkpoint import publish, writing
from megatron_ext.checkpoint.best import BestCheckpoint
from megatron_ext.checkpoint.files import Files, folder_of
from megatron_ext.checkpoint.manifest import MANIFEST, read_root, write_manifest
from megatron_ext.checkpoint.snapshot import SnapshotFile
from megatron_ext.checkpoint.storage import one_line
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.disk.bus import tell_bus_errors
from megatron_ext.disk.writing import write_bytes, write_text
from megatron_ext.errors import CheckpointError, leave_signals_to

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 0.02
_SECONDS_FOR_THE_FOLDER = 5.0
"""Seconds within which a machine must see the folder that rank 0 has made on shared storage."""
_NICENESS = 5
"""Added to the helpers' niceness, so that ranks on the same processors come first."""


@dataclass(frozen=True)
class Job:
    """A task for one rank's helper: to write the rank's part of one checkpoint.

    Attributes:
        number: identifies the job in a `Report`.
        snapshot: file with the rank's part of the checkpoint.
        root: the save folder.
        seconds: how long rank 0's helper waits for other ranks' results. The wait restarts
            whenever the files of the checkpoint have grown.
        best: the checkpoints with the lowest validation losses, lowest first; none is removed.
        superseded: iterations whose checkpoints should be removed.
    """

    number: int
    iteration: int
    rank: int
    world_size: int
    snapshot: str
    root: str
    seconds: float
    config: CheckpointConfig
    best: tuple[BestCheckpoint, ...] = ()
    superseded: tuple[int, ...] = ()

    @property
    def folder(self) -> Path:
        """Return the temporary folder of the checkpoint, which is renamed when it is published."""
        return publish.temporary_folder_of(Path(self.root), self.iteration)


@dataclass(frozen=True)
class Report:
    """A message of a helper: the stage that the job ``number`` has reached, or why it failed."""

    number: int
    stage: str
    reason: str = ""


WRITTEN, PUBLISHED, TIDIED, FAILED = "written", "published", "tidied", "failed"
"""Stages of a job.

WRITTEN: the rank's files are written. PUBLISHED: the checkpoint has its final name, and the save
can no longer fail. TIDIED: old checkpoints are removed. FAILED: the checkpoint could not be
written.
"""


def serve(connection: Connection, rank_process: int) -> None:
    """Do the jobs that arrive on a connection, until the rank closes it or dies.

    ``rank_process`` is the process id of the rank.
    """
    leave_signals_to(rank_process)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    tell_bus_errors()
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, OSError):
            return
        try:
            stage = _do(job, connection)
            reason = ""
        except Exception as error:
            stage = FAILED
            reason = one_line(error, job.folder)
            _give_up(job, reason)
        connection.send(Report(job.number, stage, reason))
        if stage == PUBLISHED:
            _tidy(job)
            connection.send(Report(job.number, TIDIED))


def _do(job: Job, connection: Connection) -> str:
    root = Path(job.root)
    is_first = job.rank == 0
    if is_first and is_published(job):
        publish.complete(root, job.iteration)
    elif is_first and (listed := _listed(job.folder)) is not None:
        _publish(job, listed)
    else:
        snapshot = SnapshotFile(Path(job.snapshot)).read()
        if snapshot is None:
            raise CheckpointError(f"The copy of the state of rank {job.rank} cannot be read.")
        pickled, values, common, counters = snapshot.state()
        plan, metadata = pickle.loads(pickled)
        _write_shards(job, plan, values)
        if not is_first:
            return WRITTEN
        connection.send(Report(job.number, WRITTEN))
        results = _results(job)
        files = _write_common(job, common, pickle.loads(counters), metadata, results)
        write_manifest(job.folder, files)
        _publish(job, files)
    return PUBLISHED


def _tidy(job: Job) -> None:
    """Remove the old checkpoints that neither the flags nor ``job`` keep; only log errors."""
    root = Path(job.root)
    try:
        publish.tidy(root, job.iteration, job.config, job.best, job.superseded)
    except OSError as error:
        text = "The checkpoint of iteration %d is saved, but %s is not tidied up: %s."
        logger.warning(text, job.iteration, root, one_line(error))


def is_published(job: Job) -> bool:
    """Return whether the job's checkpoint is published already, maybe by a helper that has died."""
    return not job.folder.is_dir() and folder_of(Path(job.root), job.iteration).is_dir()


def _write_shards(job: Job, plan: SavePlan, values: list[Tensor | bytes]) -> None:
    """Write the file with a rank's shards, then a file that describes it for rank 0's helper.

    Do nothing if an earlier helper wrote both before it died.
    """
    result = _result_of(job.folder, job.rank)
    if result.exists():
        return
    patience = time.monotonic() + _SECONDS_FOR_THE_FOLDER
    while not job.folder.is_dir():
        if time.monotonic() > patience:
            raise CheckpointError(f"{job.folder} has disappeared.")
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    written, files = writing.write_shards(job.folder, plan, values, per_thread_copy_ahead=0)
    unfinished = result.with_suffix(".part")
    write_bytes(unfinished, pickle.dumps((written, files)))
    os.replace(unfinished, result)


def _write_common(
    job: Job,
    common: dict[str, Any],
    counters: tuple[dict[str, Any], dict[str, Any]],
    metadata: Metadata,
    results: list[tuple[Any, Files]],
) -> Files:
    """Write the files that belong to no single rank; return size and checksum of all files.

    Args:
        job: the job of rank 0.
        common: the state that all ranks share.
        counters: the run's counters, and its configuration.
        metadata: the index of all tensors, which is completed with ``results``.
        results: the results of all ranks, as `_results` returns them.
    """
    # torch would save a view of the copied memory together with all memory around it.
    own = tree_map_only(Tensor, Tensor.clone, common)
    written = [of_rank for of_rank, _ in results]
    files = writing.write_common(job.folder, own, *counters, metadata, written)
    return {name: entry for _, listed in results for name, entry in listed.items()} | files


def _result_of(folder: Path, rank: int) -> Path:
    return folder / f"__{rank}.result"


def _failure_of(folder: Path, rank: int) -> Path:
    return folder / f"__{rank}.failed"


def tell_failure(folder: Path, rank: int, reason: str) -> None:
    """Write a file into ``folder`` that says why the part of ``rank`` cannot be written.

    The helper of rank 0, which waits for all parts, reads it.
    """
    failure = _failure_of(folder, rank)
    unfinished = failure.with_suffix(".part")
    try:
        write_text(unfinished, reason)
        os.replace(unfinished, failure)
    except OSError:
        # Even a full disk may have room for an empty file.
        write_text(failure, "")


def _results(job: Job) -> list[tuple[Any, Files]]:
    """Wait for the results of all ranks, and return them in the order of ranks.

    Each result is (torch's record of the items that the rank has written, the rank's files with
    size and checksum).

    Raises:
        CheckpointError: a rank has failed, or has left no result within the time limit.
    """
    deadline = time.monotonic() + job.seconds
    seen = 0
    missing = set(range(job.world_size))
    while missing:
        # One listing, instead of two questions for each of perhaps thousands of ranks.
        present = {path.name for path in job.folder.iterdir()} if job.folder.is_dir() else set()
        for rank in sorted(missing):
            failure = _failure_of(job.folder, rank)
            if failure.name in present:
                # The file is empty if the disk was full.
                reason = failure.read_text(encoding="utf-8") or "it could not even say why"
                raise CheckpointError(f"rank {rank} could not write its part: {reason}")
            if _result_of(job.folder, rank).name in present:
                missing.discard(rank)
        if missing and time.monotonic() > deadline:
            before, seen = seen, written_bytes(job.folder)
            if seen > before:
                deadline = time.monotonic() + job.seconds
                continue
            names = ", ".join(map(str, sorted(missing)))
            raise CheckpointError(
                f"{job.folder} has nothing of rank {names} after {job.seconds:.0f} seconds"
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS if missing else 0)
    paths = (_result_of(job.folder, rank) for rank in range(job.world_size))
    return [pickle.loads(path.read_bytes()) for path in paths]


def written_bytes(folder: Path) -> int:
    """Return the size of all files in a folder; 0 if there is no folder."""
    with suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0


def _listed(folder: Path) -> Files | None:
    """Return the manifest in ``folder`` if an earlier helper of rank 0 has written it, else None.

    A damaged manifest is removed. If there is a manifest, the caller must not wait for the other
    ranks' results: the earlier helper has read them, and may have removed them.
    """
    try:
        return read_root(folder)
    except CheckpointError:
        (folder / MANIFEST).unlink()
        return None


def _publish(job: Job, files: Files) -> None:
    for path in job.folder.glob("__*.result"):
        path.unlink()
    publish.publish(Path(job.root), job.iteration, files)


def _give_up(job: Job, reason: str) -> None:
    """Remove, on rank 0, what has been written; on other ranks, tell rank 0's helper the reason."""
    with suppress(OSError):
        if job.rank == 0:
            shutil.rmtree(job.folder)
        elif job.folder.is_dir():
            tell_failure(job.folder, job.rank, reason)


def main(descriptor: int, rank_process: int) -> None:
    """Run a replacement for a helper that has died, in a new process.

    Args:
        descriptor: file descriptor of the connection to the rank, inherited from the rank.
        rank_process: process id of the rank.
    """
    serve(Connection(descriptor), rank_process)
