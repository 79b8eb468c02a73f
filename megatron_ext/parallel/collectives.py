"""Run work on one or all ranks and raise its error on every rank, so that no rank waits forever.

`gather_or_raise` and `on_first_rank` are for checkpoints. `on_reporting_rank` and
``on_first_of_...`` are for work that one rank does for the run or for its replica, which here is a
group of tensor- and context-parallel ranks. The argument ``what`` describes the work, for example
"Loading the weights", at the start of the message of an unexpected error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext import limits
from megatron_ext.errors import CheckpointError, DataError, MegatronExtError
from megatron_ext.parallel.context import ParallelContext

T = TypeVar("T")


def from_all_ranks(
    value: T, fault: MegatronExtError | None, group: ProcessGroup | None = None
) -> list[T]:
    """Return the ``value`` that each rank of a group passes, in rank order.

    All ranks of the group call this together; None is the group of all ranks. ``fault`` is the
    error that this rank has met, None if it met none.

    Raises:
        MegatronExtError: on every rank, the ``fault`` of the lowest rank that passes one.
    """
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, (value, fault), group=group)
    for _, error in gathered:
        if error is not None:
            raise error
    return [entry for entry, _ in gathered]


def gather_or_raise(work: Callable[[], T], what: str) -> list[T]:
    """Run work without communication on every rank, and return all results by rank.

    Raises:
        CheckpointError: on every rank, the error of the first rank whose work fails. Its message
            begins with ``what``, unless the work itself raised a CheckpointError.
    """
    result: T | None = None
    fault: CheckpointError | None = None
    try:
        result = work()
    except CheckpointError as error:
        fault = error
    except Exception as error:
        fault = CheckpointError(f"{what}: {limits.limit_fault(error) or error}")
    return from_all_ranks(result, fault)  # type: ignore[arg-type]


def on_first_rank(work: Callable[[], T], what: str) -> T:
    """Run ``work`` on rank 0 only; return its result on every rank. All ranks call this together.

    ``work`` must not communicate with other ranks.

    Raises:
        CheckpointError: on every rank, if the work fails. Its message begins with ``what``, unless
            the work itself raised a CheckpointError.
    """
    is_first = torch.distributed.get_rank() == 0
    return gather_or_raise(lambda: work() if is_first else None, what)[0]  # type: ignore[return-value]


def on_reporting_rank(work: Callable[[], T], what: str, context: ParallelContext) -> T | None:
    """Run work without communication on the rank that prints and logs for the run.

    All ranks of the run call this together; the other ranks return None.

    Raises:
        MegatronExtError: on every rank of the run, if the work fails. Other errors are printed with
            their traceback, and raised as a DataError that names the work ``what``.
    """
    return _on_some_ranks(context.is_reporting_rank, work, what, context, None)


def on_first_of_replica(work: Callable[[], T], what: str, context: ParallelContext) -> T | None:
    """Run work on the first rank of each replica (`is_first_of_replica`); others return None.

    All ranks of the run call this together, and all raise an error as in `on_reporting_rank`.
    """
    return _on_some_ranks(is_first_of_replica(context), work, what, context, None)


def on_first_of_this_replica(
    work: Callable[[], T], what: str, context: ParallelContext
) -> T | None:
    """Run work on the first rank of this replica, and return None on the replica's other ranks.

    Only the ranks of the replica call this together, and only they raise the error of the work.
    """
    return _on_some_ranks(is_first_of_replica(context), work, what, context, context.pgs.tp_cp)


def _on_some_ranks(
    works: bool,
    work: Callable[[], T],
    what: str,
    context: ParallelContext,
    group: ProcessGroup | None,
) -> T | None:
    result: T | None = None
    fault: MegatronExtError | None = None
    try:
        result = work() if works else None
    except MegatronExtError as error:
        fault = error
    except Exception as error:
        traceback.print_exc()
        what = f"{what} failed ({error!r})"
        fault = DataError(f"{what}; see the traceback of rank {context.rank}.")
    from_all_ranks(None, fault, group)
    return result


def is_first_of_replica(context: ParallelContext) -> bool:
    """Return whether this rank is the first of its replica: tensor and context rank 0."""
    return context.tp_rank == 0 and context.cp_rank == 0


def share(
    tensor: Tensor | None, shape: Sequence[int], context: ParallelContext, device: torch.device
) -> Tensor:
    """Broadcast ``tensor`` of shape ``shape`` from a replica's first rank; return it in float32.

    All ranks of the replica call this together, and each gets the tensor on ``device``. ``tensor``
    is ignored on all but the first rank.
    """
    if is_first_of_replica(context):
        assert tensor is not None
        shared = tensor.to(device, torch.float32).contiguous()
    else:
        shared = torch.empty(tuple(shape), device=device)
    torch.distributed.broadcast(shared, group=context.pgs.tp_cp, group_src=0)
    return shared
