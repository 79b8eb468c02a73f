"""Distributes whole matrices over the ranks that share the optimizer's state.

With the distributed optimizer, a rank updates a piece of the flattened parameters, which may begin
and end anywhere in a matrix. But a matrix can only be orthogonalized as a whole. So one rank of the
data-parallel group, its owner, gathers all pieces of a matrix and sends each rank its piece of the
result. Owners are chosen so that all ranks have about the same work. The matrices are handled in
rounds, and the pieces of all matrices of a round are sent in one collective.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.optim.matrices import Matrix
from megatron_ext.optim.shards import Shard

ROUND = 2**24
"""Largest number of elements that a rank gets in one collective, unless one matrix has more."""


@dataclass(frozen=True, eq=False)
class Dealt:
    """A matrix that has been assigned to a rank, its owner, which orthogonalizes it.

    Attributes:
        shard: this rank's elements of the weight.
        pieces: for each rank that shares the optimizer's state, the slice of the flattened weight
            that the rank updates.
        owner: index of the owner among these ranks.
    """

    matrix: Matrix
    shard: Shard
    pieces: tuple[slice, ...]
    owner: int = 0

    @property
    def is_whole(self) -> bool:
        """Return whether the owner updates the whole weight, so that nothing is gathered."""
        return _length(self.pieces[self.owner]) == self.matrix.parameter.numel()


def _length(piece: slice) -> int:
    return int(piece.stop - piece.start)


def deal(shards: Sequence[tuple[Matrix, Shard]], group: ProcessGroup | None) -> list[list[Dealt]]:
    """Assign an owner to each matrix, and divide the matrices into rounds, the same on all ranks.

    The matrices of a round are sent to their owners together, in one collective. In each round a
    rank owns at most `ROUND` elements, or a single larger matrix. All ranks call this together,
    with the same matrices in the same order.

    Args:
        shards: each matrix with this rank's shard of it.
        group: the ranks that share the optimizer's state; None if this rank updates whole weights.

    Returns:
        The matrices of each round.
    """
    own = [(shard.start, shard.start + shard.main.numel()) for _, shard in shards]
    pieces = [own]
    if group is not None:
        pieces = [own] * group.size()
        torch.distributed.all_gather_object(pieces, own, group=group)
    dealt = [
        Dealt(matrix, shard, tuple(slice(*rank_pieces[index]) for rank_pieces in pieces))
        for index, (matrix, shard) in enumerate(shards)
    ]
    queues = _queues(dealt, len(pieces))
    rounds = []
    while any(queues):
        rounds.append([x for queue in queues for x in _taken(queue)])
    return rounds


def _queues(dealt: Sequence[Dealt], ranks: int) -> list[list[Dealt]]:
    """Assign an owner to each matrix; return the matrices of each rank, as one list per rank.

    Matrices are assigned by falling cost, each to the rank with the least work so far.
    """
    queues: list[list[Dealt]] = [[] for _ in range(ranks)]
    work = [(0, rank) for rank in range(ranks)]
    for each in sorted(dealt, key=lambda x: -x.matrix.operations):
        done, owner = heapq.heappop(work)
        queues[owner].append(Dealt(each.matrix, each.shard, each.pieces, owner))
        heapq.heappush(work, (done + each.matrix.operations, owner))
    return queues


def _taken(queue: list[Dealt]) -> list[Dealt]:
    """Remove and return the first matrices of a queue that together have at most `ROUND` elements.

    A matrix with more elements is taken alone.
    """
    sizes = accumulate(each.matrix.parameter.numel() for each in queue)
    count = max(1, sum(size <= ROUND for size in sizes))
    taken = queue[:count]
    queue[:] = queue[count:]
    return taken


def gather(dealt: Sequence[Dealt], pieces: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Send each rank's pieces of the matrices of one round (see `deal`) to the matrices' owners.

    All ranks of ``group`` call this together.

    Args:
        dealt: all matrices of the round.
        pieces: this rank's flat piece of each matrix, for example of its momentum.

    Returns:
        For each matrix that this rank owns, all elements as a flat tensor.
    """
    me = group.rank()
    owned = [each for each in dealt if each.owner == group.rank()]
    kept = [piece for each, piece in zip(dealt, pieces, strict=True) if each.owner == me]
    if all(each.is_whole for each in dealt):
        return kept
    ranks = range(group.size())
    sizes = [sum(_length(x.pieces[me]) for x in dealt if x.owner == r) for r in ranks]
    received = [sum(_length(x.pieces[r]) for x in owned) for r in ranks]
    arrived: Tensor = all_to_all(group, torch.cat(list(pieces)), received, sizes)
    whole = [arrived.new_empty(each.matrix.parameter.numel()) for each in owned]
    start = 0
    for rank in ranks:
        for each, tensor in zip(owned, whole, strict=True):
            length = _length(each.pieces[rank])
            tensor[each.pieces[rank]] = arrived[start : start + length]
            start += length
    return whole


def scatter(
    dealt: Sequence[Dealt], whole: Sequence[Tensor], group: ProcessGroup, dtype: torch.dtype
) -> list[Tensor]:
    """Send each rank its pieces of the matrices of one round (see `deal`); the reverse of `gather`.

    All ranks of ``group`` call this together.

    Args:
        dealt: all matrices of the round.
        whole: the matrices that this rank owns, each as a flat tensor.
        dtype: dtype of all matrices.

    Returns:
        For each matrix of the round, this rank's flat piece.
    """
    me = group.rank()
    owned = [each for each in dealt if each.owner == group.rank()]
    nothing = torch.empty(0, dtype=dtype, device=dealt[0].shard.main.device)
    if all(each.is_whole for each in dealt):
        kept = iter(whole)
        return [next(kept) if each.owner == me else nothing for each in dealt]
    ranks = range(group.size())
    pairs = list(zip(owned, whole, strict=True))
    sent = [tensor[each.pieces[rank]] for rank in ranks for each, tensor in pairs]
    sizes = [sum(_length(x.pieces[r]) for x in owned) for r in ranks]
    received = [sum(_length(x.pieces[me]) for x in dealt if x.owner == r) for r in ranks]
    arrived: Tensor = all_to_all(group, torch.cat([nothing, *sent]), received, sizes)
    return list(torch.split(arrived, [_length(each.pieces[me]) for each in dealt]))
