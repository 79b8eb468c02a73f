"""The order of each pipeline rank's forward and backward passes under each schedule."""

from __future__ import annotations

from functools import lru_cache

from megatron_ext.config.parallel import PAIRED_SCHEDULES, V_SHAPED
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.grid import Placement
from megatron_ext.schedules.plan import (
    EVEN,
    Action,
    Durations,
    Kind,
    Order,
    Plan,
    with_messages,
)


def one_f_one_b(placement: Placement, num_microbatches: int, *, pairs: bool) -> list[Order]:
    """Return the 1F1B order of each rank (arXiv:2006.09503; arXiv:2104.04473, fig. 3).

    A rank's warm-up is one forward pass for each stage after its own. With ``pairs`` it is two for
    each: a result reaches the next rank only when a pair has ended, on the way there and back.
    """
    warmup_per_stage = 2 if pairs else 1
    return [
        _alternate(
            [Action(Kind.FORWARD, i, rank) for i in range(num_microbatches)],
            [Action(Kind.BACKWARD, i, rank) for i in range(num_microbatches)],
            warmup_per_stage * (placement.pipeline_size - rank - 1),
            pairs=pairs,
        )
        for rank in range(placement.pipeline_size)
    ]


def interleaved(
    placement: Placement, num_microbatches: int, group_size: int, *, pairs: bool
) -> list[Order]:
    """Return each rank's order of interleaved 1F1B (arXiv:2104.04473, section 2.2).

    As in megatron-core, a rank runs a group of ``group_size`` micro-batches through one chunk
    before the next chunk. If fewer micro-batches than pipeline ranks remain for the last group,
    they join the group before it.
    """
    size = placement.pipeline_size
    chunks = placement.num_chunks
    groups = _groups(num_microbatches, group_size, at_least=size)
    table = chunk_order(groups, chunks)
    orders = []
    for rank in range(size):
        stages = [placement.stage_of(rank, chunk) for chunk in range(chunks)]
        forwards = [Action(Kind.FORWARD, i, stages[c]) for i, c in table]
        backwards = [Action(Kind.BACKWARD, i, stages[chunks - 1 - c]) for i, c in table]
        warmup = (size - rank - 1) * 2 + (chunks - 1) * max(groups)
        orders.append(_alternate(forwards, backwards, warmup, pairs=pairs))
    return orders


def forward_only_order(placement: Placement, num_microbatches: int) -> list[Order]:
    """Return each rank's order of forward passes in an evaluation step.

    A rank runs ``pipeline_size`` micro-batches through one chunk before the next chunk.
    """
    groups = _groups(num_microbatches, placement.pipeline_size, at_least=1)
    table = chunk_order(groups, placement.num_chunks)
    return [
        [Action(Kind.FORWARD, i, placement.stage_of(rank, c)) for i, c in table]
        for rank in range(placement.pipeline_size)
    ]


def _groups(num_microbatches: int, group_size: int, *, at_least: int) -> list[int]:
    """Divide micro-batches into groups of ``group_size``, and return the sizes of the groups.

    A remainder of ``at_least`` micro-batches or more forms a group of its own; a smaller one joins
    the last group.
    """
    whole, rest = divmod(num_microbatches, group_size)
    sizes = [group_size] * whole
    if rest and sizes and rest < at_least:
        sizes[-1] += rest
    elif rest:
        sizes.append(rest)
    return sizes


def chunk_order(groups: list[int], num_chunks: int) -> list[tuple[int, int]]:
    """Return pairs ``(microbatch, chunk)``, group by group and, within a group, chunk by chunk."""
    table = []
    first = 0
    for size in groups:
        table += [(first + i, chunk) for chunk in range(num_chunks) for i in range(size)]
        first += size
    return table


def _alternate(forwards: Order, backwards: Order, warmup: int, *, pairs: bool) -> Order:
    """Return the order that consists of warm-up, steady phase and cool-down.

    The first ``warmup`` forward passes are the warm-up. In the steady phase one forward and one
    backward pass alternate, or run as a pair; the cool-down runs the remaining backward passes.
    With ``pairs`` the warm-up has one more forward pass, since the passes of a pair cannot be of
    the same micro-batch.
    """
    warmup = min(warmup + pairs, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        if pairs:
            order.append(forward.beside(backward))
        else:
            order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]


SCHEDULES = ("no-pipelining", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


@lru_cache(maxsize=64)
def build_plan(
    schedule: str,
    *,
    pipeline_size: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    forward_only: bool = False,
    durations: Durations = EVEN,
    pairs: bool = False,
) -> Plan:
    """Return the lists of actions of all pipeline ranks for one step.

    Args:
        num_chunks: number of stages on each rank: more than one for interleaved, two for
            zb-v and dualpipe-v.
        group_size: micro-batches that an interleaved chunk runs before the next chunk; default and
            minimum are the pipeline size.
        durations: expected times; they decide zb-v's order and when receives are posted.
        pairs: whether a forward pass of one micro-batch and a backward pass of another run in
            turns; see `Kind.PAIR`. Evaluation steps have no pairs.

    Raises:
        ConfigError: the schedule is unknown, or does not allow the pipeline size, the number of
            chunks, the group size or pairs.
    """
    _check(schedule, pipeline_size, num_chunks, group_size, pairs=pairs)
    placement = Placement(pipeline_size, num_chunks, v_shape=schedule in V_SHAPED)
    orders: list[Order]
    if forward_only:
        orders = forward_only_order(placement, num_microbatches)
    elif schedule in ("no-pipelining", "1f1b"):
        orders = one_f_one_b(placement, num_microbatches, pairs=pairs)
    elif schedule == "interleaved":
        group_size = group_size or pipeline_size
        orders = interleaved(placement, num_microbatches, group_size, pairs=pairs)
    elif schedule == "dualpipe-v":
        from megatron_ext.schedules.dualpipe import dualpipe_v

        orders = dualpipe_v(placement, num_microbatches, pairs=pairs)
    else:
        from megatron_ext.schedules.zero_bubble import zb_h1, zb_v

        if schedule == "zb-h1":
            orders = zb_h1(placement, num_microbatches)
        else:
            orders = zb_v(placement, num_microbatches, durations)
    ranks = with_messages(orders, placement, durations)
    return Plan(schedule, placement, num_microbatches, tuple(tuple(rank) for rank in ranks))


def _check(
    schedule: str, pipeline_size: int, num_chunks: int, group_size: int | None, *, pairs: bool
) -> None:
    if schedule not in SCHEDULES:
        raise ConfigError(f"The schedule `{schedule}` must be one of {', '.join(SCHEDULES)}.")
    needed, fits = {
        "interleaved": ("2 or more", num_chunks > 1),
        **dict.fromkeys(V_SHAPED, ("2", num_chunks == 2)),
    }.get(schedule, ("1", num_chunks == 1))
    if not fits:
        raise ConfigError(
            f"The schedule `{schedule}` needs {needed} chunks on each rank, not {num_chunks}."
        )
    if schedule == "no-pipelining" and pipeline_size != 1:
        raise ConfigError(f"The schedule `{schedule}` is for 1 rank, not {pipeline_size}.")
    if group_size is not None and group_size < pipeline_size:
        raise ConfigError(
            f"A group of micro-batches ({group_size}) must be at least as large as the pipeline; "
            f"use {pipeline_size}."
        )
    if pairs and schedule not in PAIRED_SCHEDULES:
        raise ConfigError(
            f"The schedule `{schedule}` has no pairs of a forward and a backward pass; use one of "
            f"{', '.join(PAIRED_SCHEDULES)}."
        )
