"""Work of one rank, whose result or error belongs to a group of ranks."""

import errno
from unittest import mock

import pytest
import torch

from megatron_ext.errors import CheckpointError, DataError
from megatron_ext.parallel.collectives import (
    from_all_ranks,
    gather_or_raise,
    largest_of_all_ranks,
    on_every_rank,
    on_first_of_replica,
    on_first_of_this_replica,
    on_first_rank,
    on_reporting_rank,
    share,
    sum_of_all_ranks,
    to_first_rank,
    union_of_all_ranks,
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
    told = torch.full((3,), context.rank) if is_first else None
    found = share(told, (3,), context, torch.device("cpu"))
    assert found.dtype == torch.float32
    assert found.tolist() == [float(context.rank // 4 * 4)] * 3
    seen: list[float | None] = [None] * 8
    torch.distributed.all_gather_object(seen, on_reporting_rank(lambda: 1.0, "It", context))
    assert seen == [None] * 7 + [1.0]
    first = context.rank // 2 * 2
    assert from_all_ranks(context.rank, None, context.pgs.tp) == [first, first + 1]
    assert gather_or_raise(lambda: context.rank, "It") == list(range(8))
    assert on_first_rank(lambda: context.rank + 5, "It") == 5
    assert on_every_rank(lambda: context.rank, "It") == context.rank
    gathered = to_first_rank(lambda: context.rank, "It")
    assert gathered == (list(range(8)) if context.rank == 0 else [])
    assert largest_of_all_ranks([context.rank, -context.rank]) == [7, 0]
    # A sum is modulo 2^64.
    assert sum_of_all_ranks(2**61 + context.rank) == 28
    # Names that all have, that a pipeline's ranks share, and that one rank of the world has.
    names = {"all", f"stage {context.pp_rank}"} | ({"alone"} if context.rank == 5 else set())
    assert union_of_all_ranks(names, context) == {"all", "stage 0", "alone"}


def fail_on_first(rank: int) -> None:
    raise ValueError("odd" if rank == 0 else "no other rank works")


@ranks(tp=2, cp=2, dp=2)
def test_an_error_of_the_first_rank_is_raised_on_all(context: ParallelContext) -> None:
    def fail() -> None:
        raise DataError(f"Rank {context.rank} finds nothing.")

    def meets_a_limit() -> None:
        if context.rank in (3, 5):
            raise OSError(errno.EMFILE, f"Too many open files on {context.rank}")

    def breaks() -> None:
        if context.rank == 4:
            raise ValueError("odd")

    with pytest.raises(DataError, match="Rank 0 finds nothing"):
        on_first_of_replica(fail, "The work", context)
    # The ranks of the other replica do not hear of it.
    with pytest.raises(DataError, match=f"Rank {context.rank // 4 * 4} finds nothing"):
        on_first_of_this_replica(fail, "The work", context)
    with pytest.raises(DataError, match="Rank 7 finds nothing"):
        on_reporting_rank(fail, "The work", context)
    with pytest.raises(CheckpointError, match=r"The files: this process may have \d+ open files"):
        gather_or_raise(meets_a_limit, "The files")
    for call in (on_every_rank, to_first_rank):
        with pytest.raises(CheckpointError, match=r"The files: this process may have \d+ open"):
            call(meets_a_limit, "The files")
    with pytest.raises(CheckpointError, match=r"^The files: odd"):
        on_first_rank(lambda: fail_on_first(context.rank), "The files")
    sentence = r"The work failed \(ValueError\('odd'\)\); see the traceback of rank 4\."
    with mock.patch("traceback.print_exc") as shown, pytest.raises(DataError, match=sentence):
        on_first_of_replica(breaks, "The work", context)
    assert shown.call_count == int(context.rank == 4)
