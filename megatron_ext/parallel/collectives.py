"""Run work on one or all ranks and raise its error on every rank, so that no rank waits forever.

`gather_or_raise`, `on_every_rank` and `on_first_rank` are for checkpoints. `on_reporting_rank` and
``on_first_of_...`` are for work that one rank does for the run or for its replica, which here is a
group of tensor- and context-parallel ranks. The argument ``what`` describes the work, for example
"Loading the weights", at the start of the message of an unexpected error.

Only `from_all_ranks` and `gather_or_raise` send a result of every rank to every rank, which takes
memory in proportion to the number of ranks. The others send a number, and an error if there is one.
"""

from __future__ import annotations

import hashlib
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


def largest_of_all_ranks(values: Sequence[int], group: ProcessGroup | None = None) -> list[int]:
    """Return the maximum over a group's ranks of each of ``values``; its ranks call this together.

    None is the group of all ranks.
    """
    reduced = torch.tensor(values, dtype=torch.int64, device=_device_of(group))
    torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX, group=group)
    return reduced.tolist()


def sum_of_all_ranks(value: int) -> int:
    """Return the sum of ``value`` over all ranks modulo 2^64; all ranks call this together."""
    signed = (value + 2**63) % 2**64 - 2**63
    total = torch.tensor([signed], dtype=torch.int64, device=_device_of(None))
    torch.distributed.all_reduce(total)
    return int(total) % 2**64


def _device_of(group: ProcessGroup | None) -> torch.device:
    """Return the device of the tensors that a group's backend reduces."""
    if torch.distributed.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def raise_together(fault: BaseException | None, group: ProcessGroup | None = None) -> None:
    """Raise, on every rank of a group, the ``fault`` of the lowest rank that passes one.

    All ranks of the group call this together; None is the group of all ranks. If no rank passes a
    fault, this sends a single number.
    """
    size = torch.distributed.get_world_size(group)
    rank = torch.distributed.get_rank(group)
    (before_end,) = largest_of_all_ranks([0 if fault is None else size - rank], group)
    if before_end:
        raised = [fault]
        torch.distributed.broadcast_object_list(raised, group_src=size - before_end, group=group)
        assert raised[0] is not None
        raise raised[0]


def _result_or_fault(work: Callable[[], T], what: str) -> tuple[T | None, CheckpointError | None]:
    """Run ``work``; return its result, and its error as `gather_or_raise` describes it."""
    try:
        return work(), None
    except CheckpointError as error:
        return None, error
    except Exception as error:
        return None, CheckpointError(f"{what}: {limits.limit_fault(error) or error}")


def gather_or_raise(work: Callable[[], T], what: str) -> list[T]:
    """Run work without communication on every rank, and return all results by rank.

    Raises:
        CheckpointError: on every rank, the error of the first rank whose work fails. Its message
            begins with ``what``, unless the work itself raised a CheckpointError.
    """
    return from_all_ranks(*_result_or_fault(work, what))  # type: ignore[arg-type]


def on_every_rank(work: Callable[[], T], what: str) -> T:
    """Run work without communication on every rank, and return this rank's own result.

    Errors are raised as by `gather_or_raise`.
    """
    result, fault = _result_or_fault(work, what)
    raise_together(fault)
    return result  # type: ignore[return-value]


def to_first_rank(work: Callable[[], T], what: str) -> list[T]:
    """Run work without communication on every rank; return all results by rank on rank 0.

    Other ranks return an empty list. Errors are raised as by `gather_or_raise`.
    """
    return to_one_rank(on_every_rank(work, what), 0)


def to_one_rank(value: T, rank: int, group: ProcessGroup | None = None) -> list[T]:
    """Return the ``value`` that each rank of a group passes, in rank order, on one of its ranks.

    All ranks of the group call this together; None is the group of all ranks. Ranks other than
    ``rank`` return an empty list.
    """
    gathered: list[Any] = []
    if torch.distributed.get_rank() == rank:
        gathered = [None] * torch.distributed.get_world_size(group)
    torch.distributed.gather_object(value, gathered or None, dst=rank, group=group)
    return gathered


def union_of_all_ranks(names: set[T], context: ParallelContext) -> set[T]:
    """Return the union of all ranks' names; all ranks of the run call this together.

    The names are those of weights, alone or in tuples that can be sorted; most ranks have them in
    common. So the ranks of a pipeline, of a tensor-parallel group and of an expert-parallel group
    exchange names in turn, until hashes say that all ranks have the same.
    """
    axes = (context.pgs.pp, context.pgs.tp, getattr(context.pgs, "ep", None), None)
    for group in axes:
        ordered: list[Any] = sorted(names)
        digest = hashlib.blake2b(repr(ordered).encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "big")
        largest, least_negated = largest_of_all_ranks([number, -number])
        if largest == -least_negated:
            break
        names = names.union(*from_all_ranks(names, None, group))
    return names


def on_first_rank(work: Callable[[], T], what: str) -> T:
    """Run ``work`` on rank 0 only; return its result on every rank. All ranks call this together.

    ``work`` must not communicate with other ranks.

    Raises:
        CheckpointError: on every rank, if the work fails. Its message begins with ``what``, unless
            the work itself raised a CheckpointError.
    """
    outcome: list[Any] = [(None, None)]
    if torch.distributed.get_rank() == 0:
        outcome = [_result_or_fault(work, what)]
    torch.distributed.broadcast_object_list(outcome, src=0)
    result, fault = outcome[0]
    if fault is not None:
        raise fault
    return result  # type: ignore[no-any-return]


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
    raise_together(fault, group)
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
