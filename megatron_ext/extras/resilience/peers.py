"""Copies of a rank's snapshots at its neighbour, made while the training goes on.

The neighbour of a rank is the next rank, or with several machines the corresponding rank on the
next machine. A copy on the same machine is made in memory. A copy for another machine is sent in
pieces over a separate process group, so that it does not wait for the collectives of the training.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_ext.checkpoint.snapshot import Snapshot, SnapshotFile, SnapshotPair

logger = logging.getLogger(__name__)

PIECE = 1 << 24
"""Bytes that are copied or sent at a time."""


def own_files(folder: Path, rank: int) -> SnapshotPair:
    """Return the two files to which a rank's own snapshots are written alternately."""
    return SnapshotPair(folder, f"rank_{rank:05d}")


def copy_files(folder: Path, rank: int) -> SnapshotPair:
    """Return the two files in which a rank's neighbour keeps copies of the rank's snapshots."""
    return SnapshotPair(folder, f"held_{rank:05d}")


def distance(machines: Sequence[str]) -> int:
    """Return how many ranks away a neighbour is, given the machine of each rank.

    On a single machine it is 1. With several, it is the largest number of ranks on one of them, so
    that neighbours are on different machines.
    """
    several = len(set(machines)) > 1
    return max(Counter(machines).values()) if several else 1


class Pair:
    """A connection of this rank and another one, over host memory; only these two create it.

    A process group of torch would need a call on every rank of the run. Two ranks that create
    several pairs must create them in the same order.
    """

    _counts: ClassVar[dict[tuple[int, int], int]] = {}

    def __init__(self, other: int, *, timeout_minutes: float = 30) -> None:
        rank = torch.distributed.get_rank()
        ranks = min(rank, other), max(rank, other)
        self._counts[ranks] = number = self._counts.get(ranks, 0) + 1
        store = torch.distributed.PrefixStore(  # type: ignore[attr-defined]
            f"pair/{ranks[0]}/{ranks[1]}/{number}",
            torch.distributed.distributed_c10d._get_default_store(),
        )
        self._other = int(other > rank)
        self._backend: Any = torch.distributed.ProcessGroupGloo(
            store, 1 - self._other, 2, timedelta(minutes=timeout_minutes)
        )

    def send(self, tensor: Tensor) -> Any:
        """Begin to send a CPU tensor, and return the work to wait for."""
        return self._backend.send([tensor], self._other, 0)

    def receive(self, tensor: Tensor) -> Any:
        """Begin to receive into a CPU tensor, and return the work to wait for."""
        return self._backend.recv([tensor], self._other, 0)


def linked(step: int) -> tuple[Pair, Pair]:
    """Connect this rank with its right and with its left neighbour; all ranks call this.

    Neighbours are ``step`` ranks apart, and so form rings. A pair of neighbours can only be
    connected while both wait for it. So first every second pair of a ring is connected, then the
    others, and last the pair that is left over in a ring of odd length.
    """
    rank = torch.distributed.get_rank()
    size = torch.distributed.get_world_size()
    num_rings = math.gcd(step, size)
    length = size // num_rings

    def turn(first: int) -> int:
        """Return when the pair of rank ``first`` and its right neighbour is connected."""
        place = first // num_rings * pow(step // num_rings, -1, length) % length
        return 2 if length % 2 and place == length - 1 else place % 2

    right = (rank + step) % size
    left = (rank - step) % size
    turns = {right: turn(rank), left: turn(left)}
    pairs = {other: Pair(other) for other in sorted(turns, key=turns.__getitem__)}
    return pairs[right], pairs[left]


def pieces_of(raw: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the pieces of a snapshot's bytes, uint8 ``[n]``, each with its offset."""
    for start in range(0, raw.numel(), PIECE):
        yield start, raw[start : start + PIECE]


class CopyOnMachine:
    """Makes the copies of a rank's snapshots for a neighbour on the same machine."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._target = copy_files(folder, rank)

    def __call__(self, snapshot: Snapshot) -> None:
        """Write a copy of this rank's snapshot to the neighbour's file.

        This runs in a thread, so that the rank can take its next snapshot meanwhile.
        """
        raw = snapshot.raw
        self._target.turn().write_raw(raw.numel(), pieces_of(raw))


class CopyOverGroup:
    """Sends this rank's snapshots to its right neighbour, and stores those of its left neighbour.

    The right neighbour of rank r is rank r + ``step``, the left one rank r - ``step``, modulo the
    number of ranks. All ranks call it the same number of times.

    All ranks create it together, and no rank is connected to others than its two neighbours.

    Args:
        step: how many ranks away a neighbour is.
    """

    def __init__(self, folder: Path, step: int) -> None:
        left = (torch.distributed.get_rank() - step) % torch.distributed.get_world_size()
        self._to_right, self._from_left = linked(step)
        self._target = copy_files(folder, left)

    def __call__(self, snapshot: Snapshot) -> None:
        """Send this rank's snapshot to the right neighbour, and store the left neighbour's."""
        mine = snapshot.raw
        sizes = torch.tensor([mine.numel()]), torch.zeros(1, dtype=torch.int64)
        self._exchange(*sizes)
        number = int(sizes[1])
        self._target.turn().write_raw(number, self._received(mine, number))

    def _received(self, mine: Tensor, number: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of the left neighbour's snapshot, each with its offset in bytes.

        Meanwhile, send ``mine``, the bytes of this rank's snapshot, to the right neighbour.
        ``number`` is the size of the left neighbour's snapshot in bytes.
        """
        buffer = torch.empty(min(PIECE, number), dtype=torch.uint8)
        for start in range(0, max(mine.numel(), number), PIECE):
            piece = buffer[: max(0, min(PIECE, number - start))]
            self._exchange(mine[start : start + PIECE], piece)
            if piece.numel():
                yield start, piece

    def _exchange(self, to_right: Tensor, from_left: Tensor) -> None:
        works: list[Any] = []
        if to_right.numel():
            works.append(self._to_right.send(to_right))
        if from_left.numel():
            works.append(self._from_left.receive(from_left))
        for work in works:
            work.wait()


class CopyThread:
    """A thread that copies snapshots one after the other.

    It is a daemon thread, so that the process can end even if a neighbour has died and the thread
    waits for it forever.
    """

    def __init__(self, copy: Callable[[Snapshot], None]) -> None:
        self._copy = copy
        self._work: queue.SimpleQueue[tuple[Snapshot, threading.Event] | None]
        self._work = queue.SimpleQueue()
        self._done: dict[Path, threading.Event] = {}
        self._thread = threading.Thread(target=self._run, name="peer checkpoints", daemon=True)
        self._thread.start()

    def start(self, snapshot: Snapshot) -> None:
        """Start copying a snapshot; its file must not be overwritten before `wait`."""
        done = self._done[snapshot.path] = threading.Event()
        self._work.put((snapshot, done))

    def wait(self, file: SnapshotFile) -> None:
        """Wait until the pending copy of a file's snapshot, if any, is complete."""
        if file.path in self._done:
            self._done[file.path].wait()

    def close(self) -> None:
        """Wait for all copies, and end the thread.

        With `CopyOverGroup` all ranks call this, since a copy needs both neighbours.
        """
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            snapshot, done = item
            try:
                self._copy(snapshot)
            # A lost neighbour or a full folder must not end the training: this rank's own snapshot
            # remains.
            except Exception as error:
                logger.warning(
                    "The neighbour has no copy of iteration %s: %s", snapshot.iteration, error
                )
            finally:
                done.set()
