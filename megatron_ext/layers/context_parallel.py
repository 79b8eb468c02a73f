"""Exchange of keys, values and heads between context-parallel ranks.

megatron-core cuts a sequence into ``2 * cp`` slices and gives rank r the slices r and ``2 * cp - 1
- r``. This "zig-zag" order makes causal attention cost the same on every rank. In "rank order" the
two slices of rank 0 come first, then those of rank 1 and so on.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup


def slices_of(rank: int, size: int) -> tuple[int, int]:
    """Return the indices of a rank's two slices of a sequence; ``size`` is the number of ranks."""
    return rank, 2 * size - 1 - rank


def to_sequence_order(gathered: Tensor, size: int) -> Tensor:
    """Reorder ``[s, ...]``, gathered from ``size`` ranks in rank order, to sequence order."""
    slices = gathered.view(2 * size, gathered.size(0) // (2 * size), *gathered.shape[1:])
    slots = [2 * i if i < size else 2 * (2 * size - 1 - i) + 1 for i in range(2 * size)]
    # Slices instead of an index tensor, which would have to be copied to the device.
    return torch.stack([slices[slot] for slot in slots]).view_as(gathered)


def to_rank_order(ordered: Tensor, size: int) -> Tensor:
    """Reorder the ``2 * size`` slices of ``[s, ...]`` from sequence order to rank order.

    For each of the ``size`` ranks r in turn, the result has the slices r and ``2 * size - 1 - r``.
    """
    slices = ordered.view(2 * size, ordered.size(0) // (2 * size), *ordered.shape[1:])
    order = [i for rank in range(size) for i in slices_of(rank, size)]
    return torch.stack([slices[i] for i in order]).view_as(ordered)


def gather_sequence(local: Tensor, group: ProcessGroup) -> Tensor:
    """Gather ``[s/cp, ...]`` to ``[s, ...]`` in sequence order; reduce-scatter the gradient."""
    gathered = gather_from_sequence_parallel_region(
        local.contiguous(), tensor_parallel_output_grad=True, group=group
    )
    return to_sequence_order(gathered, group.size())


def heads_to_sequence(x: Tensor, group: ProcessGroup, *, zigzag: bool = True) -> Tensor:
    """Gather the sequence and split the heads by one all-to-all (Ulysses, arXiv:2309.14509).

    ``[s/c, b, n, ...]`` becomes ``[s, b, n/c, ...]`` in sequence order; n must be divisible by the
    number of ranks c. With ``zigzag`` each rank's input is its two slices of the sequence (see
    `slices_of`); without, rank r holds the r-th of c contiguous parts.
    """
    traded: Tensor = all_to_all(group, torch.cat(x.chunk(group.size(), dim=2)))
    return to_sequence_order(traded, group.size()) if zigzag else traded


def sequence_to_heads(x: Tensor, group: ProcessGroup, *, zigzag: bool = True) -> Tensor:
    """Invert `heads_to_sequence`: ``[s, b, n/c, ...]`` to ``[s/c, b, n, ...]`` on c ranks.

    ``zigzag`` must be the same as in the call that is inverted.
    """
    ordered = to_rank_order(x, group.size()) if zigzag else x
    return torch.cat(all_to_all(group, ordered.contiguous()).chunk(group.size()), dim=2)
