"""Schedules by name."""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.layout import Placement
from megatron_ext.schedules.orders import forward_only as forward_only_order
from megatron_ext.schedules.orders import interleaved, one_f_one_b
from megatron_ext.schedules.plan import EVEN, Durations, Order, Plan, with_messages
from megatron_ext.schedules.zero_bubble import zb_h1, zb_v

SCHEDULES = ("no-pipelining", "1f1b", "interleaved", "zb-h1", "zb-v")


def build_plan(
    schedule: str,
    *,
    pipeline_size: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    forward_only: bool = False,
    durations: Durations = EVEN,
) -> Plan:
    """The lists of actions of all pipeline ranks for one step.

    Args:
        schedule: one of `SCHEDULES`.
        pipeline_size: ranks.
        num_microbatches: of each data-parallel rank.
        num_chunks: stages on each rank; more than one for interleaved, two for zb-v.
        group_size: micro-batches that an interleaved chunk handles before the next chunk; default
            and least: the pipeline size.
        forward_only: forward passes alone, on the schedule's placement.
        durations: expected times; they decide zb-v's order and when receives are posted.

    Raises:
        ConfigError: a number of chunks or a group size that the schedule cannot have.
    """
    _check(schedule, pipeline_size, num_chunks, group_size)
    placement = Placement(pipeline_size, num_chunks, v_shape=schedule == "zb-v")
    orders: list[Order]
    if forward_only:
        orders = forward_only_order(placement, num_microbatches)
    elif schedule in ("no-pipelining", "1f1b"):
        orders = one_f_one_b(placement, num_microbatches)
    elif schedule == "interleaved":
        orders = interleaved(placement, num_microbatches, group_size or pipeline_size)
    elif schedule == "zb-h1":
        orders = zb_h1(placement, num_microbatches)
    else:
        orders = zb_v(placement, num_microbatches, durations)
    ranks = with_messages(orders, placement, durations)
    return Plan(schedule, placement, num_microbatches, tuple(tuple(rank) for rank in ranks))


def _check(schedule: str, pipeline_size: int, num_chunks: int, group_size: int | None) -> None:
    if schedule not in SCHEDULES:
        raise ConfigError(f"The schedule `{schedule}` must be one of {', '.join(SCHEDULES)}.")
    fits = {"interleaved": num_chunks > 1, "zb-v": num_chunks == 2}.get(schedule, num_chunks == 1)
    if not fits:
        needed = {"interleaved": "2 or more", "zb-v": "2"}.get(schedule, "1")
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
