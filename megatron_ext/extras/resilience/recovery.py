"""Chooses the snapshots from which a restarted run resumes, and sends them to the ranks.

All ranks agree on the newest iteration for which the machines hold an intact snapshot of each rank:
its own, or its neighbour's copy. If the layout is unchanged, each rank resumes from its snapshot,
which is sent to its machine if it is not there. If the number of replicas has changed, a temporary
checkpoint is made from the snapshots, and loaded like any other.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from megatron_ext.checkpoint import publish
from megatron_ext.checkpoint.snapshot import Snapshot, SnapshotFile
from megatron_ext.checkpoint.state import common_state
from megatron_ext.checkpoint.stored import CheckpointRef
from megatron_ext.checkpoint.writing import CheckpointWriter
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.extras.resilience.memory import (
    PROGRESS,
    RUN_CONFIG,
    SHARDED,
    VALUES,
    MemoryCheckpoints,
)
from megatron_ext.extras.resilience.peers import PIECE, Pair, own_files, pieces_of
from megatron_ext.parallel.collectives import from_all_ranks, on_first_rank
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout

_OF_REPLICAS = ("world_size", "context_parallel_size")
"""Fields of a `Layout` that may change between the run that took snapshots and the resumed run."""
_TEMPORARY = "resharded"


@dataclass(frozen=True)
class HeldSnapshot:
    """A complete snapshot on some machine, as its header describes it.

    Attributes:
        rank: the rank whose state it holds, in the run that took it.
        layout: the layout of that run.
        is_copy: whether it is the copy that the rank's neighbour holds.
    """

    machine: str
    path: str
    rank: int
    iteration: int
    layout: Layout
    is_copy: bool


def same_weights(first: Layout, second: Layout) -> bool:
    """Return whether two layouts differ only in their numbers of replicas."""
    names = [name for name in Layout.__dataclass_fields__ if name not in _OF_REPLICAS]
    return all(getattr(first, name) == getattr(second, name) for name in names)


def choose(
    entries: Iterable[HeldSnapshot], layout: Layout, machines: Sequence[str], newer_than: int
) -> list[HeldSnapshot] | None:
    """Return, by rank, the snapshots of the newest iteration for which every rank has one.

    All of them were taken in one layout: ``layout`` if possible, or else one that differs from it
    only in the number of replicas. If a rank has several snapshots, one on its own machine is
    preferred (if taken in ``layout``), and then the rank's own to its neighbour's copy. Return None
    if there is no iteration with a snapshot of every rank.

    Args:
        entries: the snapshots to choose from, of all machines.
        layout: the layout of the run that resumes.
        machines: the name of each rank's machine, by rank of ``layout``.
        newer_than: only snapshots of later iterations are considered.
    """
    sets: dict[tuple[int, bool, Layout], dict[int, list[HeldSnapshot]]] = {}
    for entry in entries:
        if entry.iteration > newer_than and same_weights(entry.layout, layout):
            key = entry.iteration, entry.layout == layout, entry.layout
            sets.setdefault(key, {}).setdefault(entry.rank, []).append(entry)
    for key in sorted(sets, key=lambda key: key[:2], reverse=True):
        _, same, old = key
        by_rank = sets[key]
        if len(by_rank) < old.world_size:
            continue

        def cost(entry: HeldSnapshot, same: bool = same) -> tuple[bool, bool]:
            return same and machines[entry.rank] != entry.machine, entry.is_copy

        return [min(by_rank[rank], key=cost) for rank in range(old.world_size)]
    return None


def readers_of(
    entries: Iterable[HeldSnapshot], layout: Layout, machines: Sequence[str]
) -> list[int]:
    """Return, for each snapshot, the rank that must read it from its file.

    This is the rank whose state it holds, if it was taken in ``layout`` and is on that rank's
    machine. Otherwise it is some rank on the machine that has the file. ``layout`` and ``machines``
    are those of `choose`.
    """
    ranks_on: dict[str, list[int]] = {}
    for rank, name in enumerate(machines):
        ranks_on.setdefault(name, []).append(rank)
    readers = []
    for entry in entries:
        there = ranks_on[entry.machine]
        is_there = entry.layout == layout and machines[entry.rank] == entry.machine
        readers.append(entry.rank if is_there else there[entry.rank % len(there)])
    return readers


class Recovery:
    """Finds the snapshots of a run, and gives each rank the state to resume from.

    All ranks call each method together.
    """

    def __init__(self, memory: MemoryCheckpoints, context: ParallelContext) -> None:
        self.memory = memory
        self._folder = memory.folder
        self._machines = memory.machines
        self._layout = context.layout
        self._rank = context.rank
        self._pairs: dict[int, Pair] = {}

    def newest(self, newer_than: int, *, with_earlier: bool = False) -> list[HeldSnapshot] | None:
        """Return, by rank, the intact snapshots from which to resume (`choose`); None if none.

        Only iterations after ``newer_than`` count. ``with_earlier`` includes snapshots of earlier
        runs. Snapshots that fail their checksum are reported and removed.
        """
        names = self._machines.names
        parts = from_all_ranks(self._listed(with_earlier), None)
        entries = [entry for part in parts for entry in part]
        while (chosen := choose(entries, self._layout, names, newer_than)) is not None:
            damaged = self._damaged(chosen)
            if not damaged:
                return chosen
            entries = [entry for entry in entries if entry not in damaged]
        return None

    def _listed(self, with_earlier: bool) -> list[HeldSnapshot]:
        """Return this machine's snapshots; [] on ranks other than the machine's first.

        ``with_earlier`` includes snapshots of earlier runs.
        """
        listed = list[HeldSnapshot]()
        snapshots = self.memory.listed(with_earlier=with_earlier) if self._machines.is_first else ()
        for path, snapshot in snapshots:
            facts = snapshot.facts
            is_copy = path.name.startswith("held")
            # Another version of this program may have written other facts.
            with suppress(KeyError, TypeError):
                where = self._machines.own, str(path), int(facts["rank"]), snapshot.iteration
                listed.append(HeldSnapshot(*where, Layout(**facts["layout"]), is_copy))
        return listed

    def _mine(self, chosen: Collection[HeldSnapshot]) -> list[HeldSnapshot]:
        readers = readers_of(chosen, self._layout, self._machines.names)
        return [x for x, reader in zip(chosen, readers, strict=True) if reader == self._rank]

    def _damaged(self, chosen: Collection[HeldSnapshot]) -> set[HeldSnapshot]:
        """Return which of the snapshots fail their checksum; all ranks call this together.

        Each snapshot is read by one rank, which reports and removes it if it is damaged.
        """
        damaged = set()
        for entry in self._mine(chosen):
            snapshot = SnapshotFile(Path(entry.path)).read()
            if snapshot is None or not snapshot.is_intact():
                damaged.add(entry)
                sentence = f"{entry.path} does not match its checksum, so it is left out"
                print(f"[rank {self._rank}] {sentence}", file=sys.stderr, flush=True)
                Path(entry.path).unlink(missing_ok=True)
        return set[HeldSnapshot]().union(*from_all_ranks(damaged, None))

    def fetch(self, chosen: Sequence[HeldSnapshot]) -> Snapshot:
        """Return this rank's snapshot of ``chosen``; if another rank reads its file, receive it.

        ``chosen`` has a snapshot for each rank, taken in the present layout.
        """
        own = None
        readers = readers_of(chosen, self._layout, self._machines.names)
        for rank, (entry, reader) in enumerate(zip(chosen, readers, strict=True)):
            if self._rank == reader:
                snapshot = SnapshotFile(Path(entry.path)).read()
                assert snapshot is not None
                if reader == rank:
                    own = snapshot
                else:
                    self._send(snapshot, rank)
            elif self._rank == rank:
                own = self._receive(reader)
        assert own is not None
        return own

    def state_of(self, chosen: Sequence[HeldSnapshot]) -> tuple[Any, Any, Any, Path]:
        """Return the state from which this rank resumes; ``chosen`` is the result of `newest`.

        The result is (this rank's state as plain values, counters of the saved run, configuration
        of the saved run, folder of the snapshot).
        """
        snapshot = self.fetch(chosen)
        state = snapshot.state()
        return state[VALUES], state[PROGRESS], state[RUN_CONFIG], snapshot.path.parent

    @staticmethod
    def source(chosen: Sequence[HeldSnapshot]) -> str:
        """Return "peer" if some rank resumes from its neighbour's copy, else "memory"."""
        return "peer" if any(entry.is_copy for entry in chosen) else "memory"

    def _pair(self, rank: int) -> Pair:
        """Return the connection of this rank and another one, which both call this."""
        if rank not in self._pairs:
            self._pairs[rank] = Pair(rank)
        return self._pairs[rank]

    def _send(self, snapshot: Snapshot, rank: int) -> None:
        pair = self._pair(rank)
        raw = snapshot.raw
        pair.send(torch.tensor([raw.numel()])).wait()
        for _, piece in pieces_of(raw):
            pair.send(piece).wait()

    def _receive(self, rank: int) -> Snapshot | None:
        pair = self._pair(rank)
        size = torch.zeros(1, dtype=torch.int64)
        pair.receive(size).wait()
        number = int(size)
        buffer = torch.empty(min(PIECE, number), dtype=torch.uint8)

        def pieces() -> Iterable[tuple[int, torch.Tensor]]:
            for start in range(0, number, PIECE):
                piece = buffer[: min(PIECE, number - start)]
                pair.receive(piece).wait()
                yield start, piece

        return own_files(self._folder, self._rank).turn().write_raw(number, pieces())

    def publish(self, chosen: Sequence[HeldSnapshot], save: str | None) -> CheckpointRef:
        """Write snapshots of a run with another number of replicas as a temporary checkpoint.

        Loading the checkpoint then converts them to the present layout. It is written to the folder
        of snapshots or, with several machines, to ``save``.
        """
        iteration = chosen[0].iteration
        root = Path(save or ".") if self._machines.several else self._folder
        root = root / _TEMPORARY
        states = dict[int, Any]()
        for entry in self._mine(chosen):
            snapshot = SnapshotFile(Path(entry.path)).read()
            assert snapshot is not None
            states[entry.rank] = snapshot.state(to_pickle=True)
        parts = {rank: extract_sharded_base(state[SHARDED]) for rank, state in states.items()}
        sharded = {str(rank): part for rank, (part, _) in parts.items()}
        first = None
        if 0 in states:
            first = parts[0][1], states[0][PROGRESS], states[0][RUN_CONFIG]
        common, *facts = next(x for x in from_all_ranks(first, None) if x is not None)
        common |= common_state(iteration, *facts)
        what = f"{root} cannot be written"
        on_first_rank(lambda: publish.prepare(root, iteration), what)
        temporary = publish.temporary_folder_of(root, iteration)
        # The ranks of another layout hold these shards, so no replicas share the writing.
        config = CheckpointConfig(ckpt_fully_parallel_save=False)
        files, _ = CheckpointWriter(config, []).write({**sharded, **common}, temporary, *facts)
        on_first_rank(lambda: publish.publish(root, iteration, files), what)
        return CheckpointRef(root, iteration, weights_only=False)

    @staticmethod
    def remove_temporary(checkpoint: CheckpointRef) -> None:
        """Remove the checkpoint of `publish` once it is loaded; all ranks call this together."""
        torch.distributed.barrier()  # other ranks may still be reading its counters
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(checkpoint.root, ignore_errors=True)
