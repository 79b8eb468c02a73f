"""Work of the reporting rank alone, whose failure is every rank's, so that none waits for ever."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

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
