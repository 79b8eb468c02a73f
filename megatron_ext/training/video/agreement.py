"""Work of one rank alone, whose failure is every rank's, so that none waits for ever."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatron_ext.errors import DataError, MegatronExtError

if TYPE_CHECKING:
    from megatron_ext.layout import ParallelContext

T = TypeVar("T")


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
    result, fault = _done(work, what, context) if context.is_reporting_rank else (None, None)
    faults = [fault]
    torch.distributed.broadcast_object_list(faults, src=context.reporting_rank)
    if faults[0] is not None:
        raise faults[0]
    return result


def writes(context: ParallelContext) -> bool:
    """Whether this rank is the one of its replica that writes, on a pipeline of one stage.

    The reporting rank is one of them.
    """
    groups = context.pgs
    return all(group.rank() == group.size() - 1 for group in (groups.tp, groups.cp))


def on_writing_rank(work: Callable[[], T], what: str, context: ParallelContext) -> T | None:
    """Run work that does not communicate; all ranks of a replica call this together.

    As `on_reporting_rank`, but other replicas are not asked, nor do they hear of an error.

    Args:
        work: for the one that `writes`.
        what: names the work in the error.
        context: of this rank.
    """
    result, fault = _done(work, what, context) if writes(context) else (None, None)
    faults = [fault]
    for group in (context.pgs.tp, context.pgs.cp):
        if group.size() > 1:
            last = torch.distributed.get_global_rank(group, group.size() - 1)
            torch.distributed.broadcast_object_list(faults, src=last, group=group)
    if faults[0] is not None:
        raise faults[0]
    return result


def from_all_ranks(value: T, fault: MegatronExtError | None) -> list[T]:
    """Values of all ranks, by rank; all call this together.

    Args:
        value: of this rank.
        fault: what went wrong on it.

    Raises:
        MegatronExtError: the first fault, on every rank.
    """
    size = torch.distributed.get_world_size()
    gathered: list[Any] = [None] * size
    torch.distributed.all_gather_object(gathered, (value, fault))
    for _, found in gathered:
        if found is not None:
            raise found
    return [entry for entry, _ in gathered]


def _done(
    work: Callable[[], T], what: str, context: ParallelContext
) -> tuple[T | None, MegatronExtError | None]:
    """The result of work, or what is to be raised on all ranks."""
    try:
        return work(), None
    except MegatronExtError as error:
        return None, error
    except Exception as error:
        traceback.print_exc()
        return None, DataError(
            f"{what} failed ({error!r}); see the traceback of rank {context.rank}."
        )
