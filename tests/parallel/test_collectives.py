"""Work of one rank, whose result or error belongs to a group of ranks."""

import pytest
import torch

from megatron_ext.errors import DataError
from megatron_ext.parallel.collectives import (
    on_first_of_replica,
    on_first_of_this_replica,
    on_reporting_rank,
    share,
)
from megatron_ext.parallel.context import ParallelContext
from tests.ranks import ranks


@ranks(tp=2, cp=2, dp=2)
def test_one_rank_of_each_replica_works_and_shares_its_result(context: ParallelContext) -> None:
    """Number the ranks as tp is the fastest, then cp; a replica then has four ranks in a row."""
    worked: list[int] = []

    def work() -> int:
        worked.append(context.rank)
        return context.rank

    of_replica = [
        on_first_of_replica(work, "The work", context),
        on_first_of_this_replica(work, "The work", context),
    ]
    is_first = context.rank in (0, 4)
    assert of_replica == [context.rank if is_first else None] * 2
    assert worked == ([context.rank] * 2 if is_first else [])
    told = torch.full((3,), float(context.rank)) if is_first else None
    found = share(told, (3,), context, torch.device("cpu"))
    assert found.tolist() == [float(context.rank // 4 * 4)] * 3
    seen: list[float | None] = [None] * 8
    torch.distributed.all_gather_object(seen, on_reporting_rank(lambda: 1.0, "It", context))
    assert seen.count(1.0) == 1 and seen.count(None) == 7


@ranks(tp=2, cp=2)
def test_an_error_of_the_first_rank_is_raised_on_all(context: ParallelContext) -> None:
    def fail() -> None:
        raise DataError(f"Rank {context.rank} finds nothing.")

    for call in (on_first_of_replica, on_first_of_this_replica):
        with pytest.raises(DataError, match="Rank 0 finds nothing"):
            call(fail, "The work", context)
