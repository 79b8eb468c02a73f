"""Work that one rank of a replica does for the others: large encoders are held once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from megatron_ext.errors import DataError, MegatronExtError

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
    result: T | None = None
    fault: MegatronExtError | None = None
    if is_first_of_replica(context):
        try:
            result = work()
        except MegatronExtError as error:
            fault = error
        except Exception as error:
            traceback.print_exc()
            fault = DataError(
                f"{what} failed ({error!r}); see the traceback of rank {context.rank}."
            )
    faults: list[MegatronExtError | None] = [None] * context.layout.world_size
    torch.distributed.all_gather_object(faults, fault)
    for found in faults:
        if found is not None:
            raise found
    return result


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
