"""Moving keys, values and heads between context-parallel ranks.

megatron-core cuts a sequence into ``2 * cp`` slices and gives rank r the slices r and ``2 * cp - 1
- r``, so that causal attention costs every rank the same ("zig-zag").
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup


def slices_of(rank: int, size: int) -> tuple[int, int]:
    """Return the two slices of the sequence that a rank holds, in order."""
    return rank, 2 * size - 1 - rank


def to_sequence_order(gathered: Tensor, size: int) -> Tensor:
    """Reorder ``[s, ...]`` from rank order to the order of the sequence."""
    slices = gathered.view(2 * size, gathered.size(0) // (2 * size), *gathered.shape[1:])
    slots = [2 * i if i < size else 2 * (2 * size - 1 - i) + 1 for i in range(2 * size)]
    # An index tensor would have to be copied to the device.
    return torch.stack([slices[slot] for slot in slots]).view_as(gathered)


def to_rank_order(ordered: Tensor, size: int) -> Tensor:
    """Reorder ``[s, ...]`` from the order of the sequence to rank order."""
    slices = ordered.view(2 * size, ordered.size(0) // (2 * size), *ordered.shape[1:])
    order = [i for rank in range(size) for i in slices_of(rank, size)]
    return torch.stack([slices[i] for i in order]).view_as(ordered)


def gather_sequence(local: Tensor, group: ProcessGroup) -> Tensor:
    """Gather ``[s/c, ...]`` of all ranks to ``[s, ...]``; gradients are summed back to their
    owners.
    """
    gathered = gather_from_sequence_parallel_region(
        local.contiguous(), tensor_parallel_output_grad=True, group=group
    )
    return to_sequence_order(gathered, group.size())


def heads_to_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """Trade heads for sequence (Ulysses, arXiv:2309.14509).

    Args:
        x: ``[s/c, b, n, d]``, n divisible by the number of ranks c.

    Returns:
        ``[s, b, n/c, d]`` in the order of the sequence.
    """
    size = group.size()
    s, b, n, d = x.shape
    parts = x.view(s, b, size, n // size, d).permute(2, 0, 1, 3, 4).contiguous()
    exchanged = all_to_all(group, parts.view(size * s, b, n // size, d))
    return to_sequence_order(exchanged, size)


def sequence_to_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """Trade sequence for heads: ``[s, b, n/c, d]`` to ``[s/c, b, n, d]``."""
    size = group.size()
    s, b, n, d = x.shape
    exchanged = all_to_all(group, to_rank_order(x, size).contiguous())
    parts = exchanged.view(size, s // size, b, n, d).permute(1, 2, 0, 3, 4)
    out: Tensor = parts.reshape(s // size, b, size * n, d)
    return out
