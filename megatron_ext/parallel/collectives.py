"""Letting one rank's failure become every rank's, so that none waits for another for ever.

Work of the reporting rank alone, whose failure is every rank's, so that none waits for ever.

Work that one rank of a replica does for the others: large encoders are held once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from megatron_ext.errors import CheckpointError, DataError, MegatronExtError

if TYPE_CHECKING:
    from megatron_ext.parallel.context import ParallelContext

T = TypeVar("T")


def together(work: Callable[[], T], what: str) -> list[T]:
    """Run local work on every rank and gather the results.

    Args:
        work: does not communicate.
        what: names the work in the error.

    Returns:
        The results of all ranks, by rank.

    Raises:
        CheckpointError: on every rank, with the first failing rank's message.
    """
    result: T | None = None
    fault: str | None = None
    try:
        result = work()
    except Exception as error:
        fault = str(error) if isinstance(error, CheckpointError) else f"{what}: {error}"
    gathered: list[tuple[T | None, str | None]] = [
        (None, None) for _ in range(torch.distributed.get_world_size())
    ]
    torch.distributed.all_gather_object(gathered, (result, fault))
    for _, message in gathered:
        if message is not None:
            raise CheckpointError(message)
    return [value for value, _ in gathered]  # type: ignore[misc]


def on_reporting_rank(work: Callable[[], T], what: str, context: ParallelContext) -> T | None:
    """Run work that does not communicate; all ranks call this together.

    Args:
        work: for the reporting rank.
        what: names the work in the error.
        context: of this rank.

    Returns:
        Its result on the reporting rank, None on the others.

    Raises:
        MegatronExtError: what the work raised, on every rank; a DataError for any other exception,
            whose traceback the reporting rank prints.
    """
    result: T | None = None
    fault: list[MegatronExtError | None] = [None]
    if context.is_reporting_rank:
        result, fault[0] = attempted(work, what, context)
    torch.distributed.broadcast_object_list(fault, src=context.reporting_rank)
    if fault[0] is not None:
        raise fault[0]
    return result


def attempted(
    work: Callable[[], T], what: str, context: ParallelContext
) -> tuple[T | None, MegatronExtError | None]:
    """The result of work of this rank, or what is to be said of its failure.

    Args:
        work: see `on_reporting_rank`.
        what: names the work in the error.
        context: of this rank.
    """
    try:
        return work(), None
    except MegatronExtError as error:
        return None, error
    except Exception as error:
        traceback.print_exc()
        return None, DataError(
            f"{what} failed ({error!r}); see the traceback of rank {context.rank}."
        )


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
