"""The classic orders: no pipelining, 1F1B, interleaved 1F1B, and forward passes only."""

from __future__ import annotations

from megatron_ext.layout import Placement
from megatron_ext.schedules.plan import Action, Kind, Order


def one_f_one_b(placement: Placement, num_microbatches: int) -> list[Order]:
    """One forward, one backward (PipeDream-Flush, arXiv:2006.09503; arXiv:2104.04473, fig. 3).

    A rank warms up with one forward pass for each stage after it, and so holds the activations of
    at most ``pipeline_size - rank`` micro-batches. On one rank this is no pipelining.
    """
    orders = []
    for rank in range(placement.pipeline_size):
        warmup = min(placement.pipeline_size - rank - 1, num_microbatches)
        orders.append(
            _alternate(
                [Action(Kind.FORWARD, i, rank) for i in range(num_microbatches)],
                [Action(Kind.BACKWARD, i, rank) for i in range(num_microbatches)],
                warmup,
            )
        )
    return orders


def interleaved(placement: Placement, num_microbatches: int, group_size: int) -> list[Order]:
    """Interleaved 1F1B (arXiv:2104.04473, section 2.2), in megatron-core's order.

    A chunk handles a group of micro-batches before the next chunk takes over.

    Args:
        placement: stages that run through the ranks again and again.
        num_microbatches: any number; micro-batches that are left over and too few to fill the
            pipeline join the last group.
        group_size: micro-batches of a group, at least the number of ranks.
    """
    size, chunks = placement.pipeline_size, placement.num_chunks
    groups = _groups(num_microbatches, group_size, at_least=size)
    table = chunk_order(groups, chunks)
    orders = []
    for rank in range(size):
        warmup = min((size - rank - 1) * 2 + (chunks - 1) * max(groups), len(table))
        orders.append(
            _alternate(
                [Action(Kind.FORWARD, i, placement.stage_of(rank, c)) for i, c in table],
                [
                    Action(Kind.BACKWARD, i, placement.stage_of(rank, chunks - 1 - c))
                    for i, c in table
                ],
                warmup,
            )
        )
    return orders


def forward_only(placement: Placement, num_microbatches: int) -> list[Order]:
    """Forward passes alone, for evaluation; groups of micro-batches go through chunk by chunk."""
    groups = _groups(num_microbatches, placement.pipeline_size, at_least=1)
    table = chunk_order(groups, placement.num_chunks)
    return [
        [Action(Kind.FORWARD, i, placement.stage_of(rank, c)) for i, c in table]
        for rank in range(placement.pipeline_size)
    ]


def _groups(num_microbatches: int, group_size: int, *, at_least: int) -> list[int]:
    """Sizes of the groups; a last one below ``at_least`` is added to the one before it."""
    whole, rest = divmod(num_microbatches, group_size)
    sizes = [group_size] * whole
    if rest and sizes and rest < at_least:
        sizes[-1] += rest
    elif rest:
        sizes.append(rest)
    return sizes


def chunk_order(groups: list[int], num_chunks: int) -> list[tuple[int, int]]:
    """``(microbatch, chunk)`` group by group, within a group chunk by chunk."""
    table, first = [], 0
    for size in groups:
        table += [(first + i, chunk) for chunk in range(num_chunks) for i in range(size)]
        first += size
    return table


def _alternate(forwards: Order, backwards: Order, warmup: int) -> Order:
    """Warm-up, one forward and one backward in turn, cool-down."""
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]
