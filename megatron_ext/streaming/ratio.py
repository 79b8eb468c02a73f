"""Which steps train the generator, and whether it gets to see every part of a sequence."""

from __future__ import annotations

import logging
from typing import Literal

from megatron_ext.streaming.options import StreamingOptions, num_chunks

logger = logging.getLogger(__name__)

Pass = Literal["generator", "critic"]


def trains_generator(options: StreamingOptions, step: int) -> bool:
    """Whether a step, counted from 0, trains the generator as well as the critic."""
    return step % options.generator_interval == 0


def passes(options: StreamingOptions, step: int, accumulation: int = 1) -> tuple[Pass, ...]:
    """What the chunks of a step are for, in order; each pass takes the next chunk.

    Args:
        options: see `StreamingOptions.generator_interval`.
        step: counted from 0.
        accumulation: chunks of each kind in a step.
    """
    once: tuple[Pass, ...] = ("critic",)
    return (("generator", *once) if trains_generator(options, step) else once) * accumulation


def chunks_seen(options: StreamingOptions, trained_chunks: int, accumulation: int = 1) -> set[int]:
    """Chunks of a sequence that the generator ever trains, if all sequences are alike.

    Args:
        options: see `StreamingOptions.generator_interval`.
        trained_chunks: chunks of a sequence that are trained on, which are counted from 0.
        accumulation: see `passes`.
    """
    cycle = [
        kind
        for step in range(options.generator_interval)
        for kind in passes(options, step, accumulation)
    ]
    ours = [place for place, kind in enumerate(cycle) if kind == "generator"]
    return {(n * len(cycle) + x) % trained_chunks for n in range(trained_chunks) for x in ours}


def aliasing(options: StreamingOptions, accumulation: int = 1) -> str | None:
    """Why the generator misses chunks of every sequence, in a sentence; None if it does not.

    With sequences of several lengths, or chunks of several, places are drawn anew all the time.
    """
    counts = {num_chunks(options, x) - (not options.train_first_chunk)
              for x in options.sequence_lengths}  # fmt: skip
    if len(counts) > 1 or options.min_new_frames < options.max_new_frames:
        return None
    chunks = counts.pop()
    seen = chunks_seen(options, chunks, accumulation)
    if len(seen) == chunks:
        return None
    interval = options.generator_interval
    return (
        f"`generator_interval` ({interval}) and sequences of {chunks} trained chunks make the "
        f"generator see only chunks {', '.join(map(str, sorted(seen)))} of each; choose lengths "
        f"whose number of chunks has no divisor in common with {interval + 1}."
    )


def warn_of_aliasing(options: StreamingOptions, accumulation: int = 1) -> None:
    """Log `aliasing` as a warning."""
    problem = aliasing(options, accumulation)
    if problem:
        logger.warning("%s", problem)
