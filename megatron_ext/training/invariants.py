"""Cross-rank invariants, checked with --check-invariants: replicas that must be equal, are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_ext.errors import MegatronExtError

if TYPE_CHECKING:
    from megatron_ext.layout import ParallelContext


class InvariantError(MegatronExtError):
    """Ranks that must hold the same values hold different ones."""


def _digest(tensor: Tensor) -> Tensor:
    """Two order-sensitive sums of a tensor's bits, ``[2]`` int64."""
    bits = tensor.detach().contiguous().view(torch.uint8).reshape(-1).to(torch.int64)
    weights = torch.arange(1, bits.numel() + 1, device=bits.device) % 65521
    return torch.stack([bits.sum(), (bits * weights).sum()])


def _differs(digests: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    low, high = digests.clone(), digests.clone()
    torch.distributed.all_reduce(low, op=torch.distributed.ReduceOp.MIN, group=group)
    torch.distributed.all_reduce(high, op=torch.distributed.ReduceOp.MAX, group=group)
    return (low != high).any(dim=1)


def check_replicas(
    chunks: list[DistributedDataParallel], context: ParallelContext, iteration: int
) -> None:
    """Every dense parameter is the same on all data- and context-parallel ranks, and the tied
    embedding is the same on the stages that hold a copy.

    Raises:
        InvariantError: with the name of the first parameter that differs.
    """
    named = [
        (name, parameter)
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if getattr(parameter, "allreduce", True)
    ]
    differs = _differs(torch.stack([_digest(p) for _, p in named]), context.pgs.dp_cp)
    if differs.any():
        name = named[int(differs.nonzero()[0])][0]
        raise InvariantError(
            f"After iteration {iteration} the parameter `{name}` differs between data-parallel "
            "replicas; the gradients of one of them were not reduced."
        )
    copies = [p for _, p in named if getattr(p, "shared_embedding", False)]
    embedding_group = getattr(context.pgs, "embd", None)
    if copies and embedding_group is not None and embedding_group.size() > 1:
        if _differs(torch.stack([_digest(copies[0])]), embedding_group).any():
            raise InvariantError(
                f"After iteration {iteration} the copies of the tied embedding differ between "
                "pipeline stages."
            )
