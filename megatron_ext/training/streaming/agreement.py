"""Work that one rank of a replica does for the others: large encoders are held once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from megatron_ext.errors import MegatronExtError
from megatron_ext.training.video.agreement import attempted

if TYPE_CHECKING:
    from megatron_ext.layout import ParallelContext

T = TypeVar("T")


def is_first_of_replica(context: ParallelContext) -> bool:
    """This rank is the first of its tensor- and context-parallel ranks."""
    return context.tp_rank == 0 and context.cp_rank == 0


def on_first_of_replica(work: Callable[[], T], what: str, context: ParallelContext) -> T | None:
    """Run work that does not communicate on one rank of each replica; all ranks call this together.

    Args:
        work: for the first rank.
        what: names the work in the error.
        context: of this rank.

    Returns:
        Its result on the first rank of a replica, None on the others.

    Raises:
        MegatronExtError: what the work raised on the first rank that failed, on every rank of the
            run; a DataError for any other exception, whose traceback that rank prints.
    """
    result, fault = _done(work, what, context)
    from_all_ranks(None, fault)
    return result


def on_first_of_this_replica(
    work: Callable[[], T], what: str, context: ParallelContext
) -> T | None:
    """As `on_first_of_replica`, but for one replica alone, whose ranks call this together.

    Other replicas do not hear of an error; see `from_all_ranks`.
    """
    result, fault = _done(work, what, context)
    if context.pgs.tp_cp.size() > 1:
        faults = [fault]
        torch.distributed.broadcast_object_list(faults, group=context.pgs.tp_cp, group_src=0)
        fault = faults[0]
    if fault is not None:
        raise fault
    return result


def from_all_ranks(value: T, fault: MegatronExtError | None) -> list[T]:
    """Values of all ranks, by rank; all call this together.

    Args:
        value: of this rank.
        fault: what went wrong on it.

    Raises:
        MegatronExtError: the first fault, on every rank.
    """
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, (value, fault))
    for _, found in gathered:
        if found is not None:
            raise found
    return [entry for entry, _ in gathered]


def _done(
    work: Callable[[], T], what: str, context: ParallelContext
) -> tuple[T | None, MegatronExtError | None]:
    """Work of the first rank of a replica: its result, and what is to be raised on other ranks."""
    return attempted(work, what, context) if is_first_of_replica(context) else (None, None)


def share(
    known: Tensor | None, shape: Sequence[int], context: ParallelContext, device: torch.device
) -> Tensor:
    """What the first rank of the replica knows, on all its ranks, which call this together.

    Args:
        known: float tensor on the first rank; not looked at on the others.
        shape: of it.
        context: of this rank.
        device: of the result.

    Returns:
        float32.
    """
    if is_first_of_replica(context):
        assert known is not None
        found = known.to(device, torch.float32).contiguous()
    else:
        found = torch.empty(tuple(shape), device=device)
    torch.distributed.broadcast(found, group=context.pgs.tp_cp, group_src=0)
    return found
