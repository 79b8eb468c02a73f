"""Global batch sizes that change during a run, by a schedule or a ramp-up, and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from megatron_ext.errors import FlagError, exclusive

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_batch_schedule(text: str) -> list[tuple[int, int]]:
    """Read a batch-size schedule such as ``"0:768 250B:1536"``, where B stands for 10**9 tokens.

    Return pairs (consumed tokens, global batch size from there on). The numbers of tokens must
    start at 0 and rise; otherwise a ValueError is raised.
    """

    def number(word: str) -> int:
        scale = _SUFFIXES.get(word[-1:].upper())
        value = float(word[:-1]) * scale if scale else float(word)
        # The product may be a little too small: 2.01 * 1000 is 2009.9999999999998.
        count = round(value)
        if abs(value - count) > 1e-9 * count:
            raise ValueError(f"{word} is not a whole number")
        return count

    pairs = [entry.split(":", 1) for entry in text.replace(",", " ").split()]
    steps = [(number(tokens), number(batch)) for tokens, batch in pairs]
    tokens_rise = all(a[0] < b[0] for a, b in pairwise(steps))
    if not steps or steps[0][0] != 0 or not tokens_rise or min(b for _, b in steps) < 1:
        raise ValueError(text)
    return steps


def last_batch_size(text: str) -> int | None:
    """Return the last batch size of a schedule; None if the text is no schedule."""
    steps = _schedule_or_none(text)
    return None if steps is None else steps[-1][1]


def _schedule_or_none(text: str) -> list[tuple[int, int]] | None:
    try:
        return parse_batch_schedule(text)
    except (ValueError, OverflowError):
        return None


def change_errors(
    schedule: str | None, rampup: Sequence[int] | None, batch: int | None
) -> Iterator[FlagError]:
    """Yield an error if the flags by which the global batch size changes are wrong.

    Args:
        schedule: value of ``--step-batch-size-schedule``; None without.
        rampup: value of ``--rampup-batch-size``; None without.
        batch: the global batch size, which the flags must reach.
    """
    if schedule is not None and rampup is not None:
        yield exclusive("--step-batch-size-schedule", "--rampup-batch-size")
    elif schedule is not None:
        yield from _schedule_errors(schedule, batch)
    elif rampup is not None and batch is not None:
        yield from _rampup_errors(rampup, batch)


def _schedule_errors(text: str, batch: int | None) -> Iterator[FlagError]:
    steps = _schedule_or_none(text)
    if steps is None:
        yield FlagError(
            "--step-batch-size-schedule",
            text,
            "must list TOKENS:BATCH_SIZE with rising tokens from 0 on",
            'use "0:768 250B:1536"',
        )
    elif batch != steps[-1][1]:
        yield FlagError(
            "--global-batch-size",
            batch,
            f"must be the last batch size of `--step-batch-size-schedule` ({steps[-1][1]})",
            "leave it out",
        )


def _rampup_errors(rampup: Sequence[int], batch: int) -> Iterator[FlagError]:
    start, increment, samples = rampup
    refused = partial(FlagError, "--rampup-batch-size", f"{start} {increment} {samples}")
    if start < 1 or increment < 1 or samples < 0 or start > batch:
        yield refused(
            f"must start between 1 and `--global-batch-size` ({batch}) and grow by at least 1"
        )
    elif start == batch or (batch - start) % increment:
        yield refused(
            f"must reach `--global-batch-size` ({batch}) in whole increments",
            f"use an increment that divides {batch - start or batch}",
        )
