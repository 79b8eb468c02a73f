"""Snapshots in each machine's memory or on its disk, from which a run resumes after a fault.

Each rank keeps its two newest snapshots, and its neighbour may hold copies of them (`peers`).
`recovery` chooses the snapshots for a restart.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.checkpoint.snapshot import Content, Snapshot, SnapshotFile, content_of
from megatron_ext.checkpoint.state import values_of
from megatron_ext.errors import CheckpointError
from megatron_ext.extras.resilience.peers import (
    CopyOnMachine,
    CopyOverGroup,
    CopyThread,
    copy_files,
    distance,
    own_files,
)
from megatron_ext.parallel.collectives import from_all_ranks, on_every_rank
from megatron_ext.parallel.context import ParallelContext

VALUES, SHARDED, PROGRESS, RUN_CONFIG = "values", "sharded", "progress", "run_config"
"""Keys of a snapshot's four parts: the state as plain values, the same state as sharded tensors,
the run's counters, and its configuration.
"""


@dataclass(frozen=True)
class Machines:
    """Tells on which machine each rank of a run is.

    Attributes:
        names: name of each rank's machine. Ranks that keep snapshots in different folders count as
            being on different machines.
        rank: this rank.
    """

    names: list[str]
    rank: int

    @classmethod
    def of(cls, folder: Path, context: ParallelContext) -> Machines:
        """Find out which ranks share ``folder``; these count as being on one machine.

        All ranks call this together.
        """
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
        name = f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}"
        names = from_all_ranks(name, None)
        return cls(names, context.rank)

    @property
    def own(self) -> str:
        """Return the name of this rank's machine."""
        return self.names[self.rank]

    @property
    def several(self) -> bool:
        """Return whether the ranks are on different machines."""
        return len(set(self.names)) > 1

    def ranks_on(self, name: str) -> list[int]:
        """Return the ranks on a machine, in ascending order."""
        return [rank for rank, other in enumerate(self.names) if other == name]

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first of its machine."""
        return self.ranks_on(self.own)[0] == self.rank


class MemoryCheckpoints:
    """Takes this rank's snapshots, and copies them to its neighbour, another rank (`peers`).

    Attributes:
        is_behind: True if this run has resumed from these snapshots with another number of
            replicas, so that the folder has no snapshots of the present layout yet.

    Args:
        folder: where all ranks of this machine keep their snapshots.
        interval: number of steps between two snapshots.
        neighbours: whether neighbours hold copies; a single rank has no neighbour.
        stays: whether to keep the snapshots when the run ends.
        left: whether the folder already has snapshots, which a killed run of the same save folder
            left behind.
        earlier: folders with snapshots of other runs, from which this run may start.
        over_group: whether to send copies over a process group even on a single machine.
    """

    def __init__(
        self,
        folder: Path,
        interval: int,
        machines: Machines,
        context: ParallelContext,
        *,
        neighbours: bool = False,
        stays: bool = False,
        left: bool = False,
        earlier: Collection[Path] = (),
        over_group: bool = False,
    ) -> None:
        self.folder = folder
        self.interval = interval
        self.machines = machines
        self.left = left
        self.stays = stays
        self._neighbours = neighbours and context.layout.world_size > 1
        self._layout = dataclasses.asdict(context.layout)
        self._rank = context.rank
        self._earlier = earlier
        self._over_group = over_group or machines.several
        self.is_behind = False
        self._own = own_files(folder, context.rank)
        self._thread: CopyThread | None = None

    @property
    def num_copies(self) -> int:
        """Return how many snapshots of a rank are kept, including the copies at its neighbour."""
        return 4 if self._neighbours else 2

    def prepare(self, *state: dict[str, Any]) -> int:
        """Reserve the memory for all snapshots; return how many bytes they need on this machine.

        The arguments are those of `take` without the iteration. All ranks call this together. If a
        machine has no room, all ranks raise a CheckpointError.
        """
        content = _content(*state)
        sizes = from_all_ranks(content.num_bytes + len(content.skeleton), None)
        here = self.machines.ranks_on(self.machines.own)
        copied_rank = self._rank
        step = distance(self.machines.names)
        if self._over_group:
            copied_rank = (self._rank - step) % len(sizes)
        needed = self.num_copies * sum(sizes[rank] for rank in here)
        files = os.statvfs(self.folder)
        free = files.f_bavail * files.f_frsize + self._bytes_on_disk()

        def reserve() -> None:
            if needed > free:
                raise CheckpointError(
                    f"{self.folder} has room for {free / 2**30:.2f} GiB, but {self.num_copies} "
                    f"snapshots of each of {len(here)} ranks need {needed / 2**30:.2f} GiB; free "
                    "some space there, or leave out `--peer-checkpoint-interval` and "
                    "`--non-persistent-save-interval`."
                )
            self._own.reserve(sizes[self._rank])
            if self._neighbours:
                copy_files(self.folder, copied_rank).reserve(sizes[copied_rank])

        on_every_rank(reserve, f"no room for snapshots in {self.folder}")
        return needed

    def _bytes_on_disk(self) -> int:
        """Return how many bytes the snapshot files that are already in the folder occupy."""
        return sum(path.stat().st_size for path in self._paths())

    def take(
        self,
        iteration: int,
        state: dict[str, Any],
        progress: dict[str, Any],
        run_config: dict[str, Any],
    ) -> Snapshot:
        """Take a snapshot of ``state``, whose tensors may change as soon as this returns.

        It overwrites the older of this rank's two snapshots. The copy for the neighbour is made in
        the background; if the overwritten snapshot is still being copied, this call waits.
        ``progress`` has the run's counters, and ``run_config`` its configuration.
        """
        if self._neighbours and self._thread is None:
            self._thread = CopyThread(self._copy())
        file = self._own.turn()
        if self._thread is not None:
            self._thread.wait(file)
        facts = {"rank": self._rank, "layout": self._layout}
        snapshot = file.write(iteration, _content(state, progress, run_config), facts)
        if self._thread is not None:
            self._thread.start(snapshot)
        return snapshot

    def _copy(self) -> Callable[[Snapshot], None]:
        if self._over_group:
            step = distance(self.machines.names)
            return CopyOverGroup(self.folder, step)
        return CopyOnMachine(self.folder, self._rank)

    def discard_others(self, iteration: int) -> None:
        """Discard snapshots of iterations after ``iteration`` or of other layouts than this run's.

        Those belong to an earlier run, or to steps that were lost when the run resumed from an
        older state. A later restart must not resume from them. All ranks call this together.
        """
        self.is_behind = False
        torch.distributed.barrier()
        for path in self._paths() if self.machines.is_first else ():
            if int(path.stem.rpartition("_")[2]) >= len(self.machines.names):
                path.unlink(missing_ok=True)  # no rank of this layout would overwrite it
                continue
            snapshot = SnapshotFile(path).read()
            if snapshot is not None and not self._is_of(snapshot, iteration):
                SnapshotFile(path).discard()
        torch.distributed.barrier()

    def _is_of(self, snapshot: Snapshot, iteration: int) -> bool:
        return snapshot.iteration <= iteration and snapshot.facts.get("layout") == self._layout

    def listed(self, *, with_earlier: bool = False) -> list[tuple[Path, Snapshot]]:
        """Return this machine's complete snapshots, each with the path of its file.

        ``with_earlier`` includes the snapshots in the folders ``earlier`` of the constructor.
        """
        paths = self._paths()
        for folder in self._earlier if with_earlier else ():
            paths += _paths_in(folder)
        snapshots = [(path, SnapshotFile(path).read()) for path in paths]
        return [(path, snapshot) for path, snapshot in snapshots if snapshot is not None]

    def _paths(self) -> list[Path]:
        return _paths_in(self.folder)

    def wait(self) -> None:
        """Wait until the copies of this rank's snapshots are complete."""
        for file in self._own.files if self._thread is not None else ():
            assert self._thread is not None
            self._thread.wait(file)

    def close(self) -> None:
        """Complete all copies; all ranks call this together after the last step."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def remove(self) -> None:
        """Remove all snapshots of the run unless ``stays`` is set; all ranks call this together."""
        torch.distributed.barrier()
        for path in self._paths() if self.machines.is_first and not self.stays else ():
            path.unlink(missing_ok=True)


def _paths_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*_*.[01]"))


def _content(
    state: dict[str, Any], progress: dict[str, Any], run_config: dict[str, Any]
) -> Content:
    """Return the content of a snapshot.

    It holds the state twice: as plain values, for resuming in the same layout, and as sharded
    tensors, for other layouts. Both use the same memory.
    """
    facts = {PROGRESS: progress, RUN_CONFIG: run_config}
    return content_of({VALUES: values_of(state), SHARDED: state, **facts})
