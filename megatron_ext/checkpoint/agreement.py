"""Letting one rank's failure become every rank's, so that none waits for another for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from megatron_ext.errors import CheckpointError

T = TypeVar("T")


def together(work: Callable[[], T], what: str) -> list[T]:
    """Run local work on every rank and gather the results.

    Args:
        work: does not communicate.
        what: names the work in the error.

    Returns:
        The results of all ranks, by rank.

    Raises:
        CheckpointError: on every rank, with the first failing rank's message.
    """
    result: T | None = None
    fault: str | None = None
    try:
        result = work()
    except Exception as error:
        fault = str(error) if isinstance(error, CheckpointError) else f"{what}: {error}"
    gathered: list[tuple[T | None, str | None]] = [
        (None, None) for _ in range(torch.distributed.get_world_size())
    ]
    torch.distributed.all_gather_object(gathered, (result, fault))
    for _, message in gathered:
        if message is not None:
            raise CheckpointError(message)
    return [value for value, _ in gathered]  # type: ignore[misc]
