"""Determines with how many ranks a run may restart, and handles requests for another number.

The global batch and the order of the data, and therefore the losses, do not depend on the number of
replicas, as long as it divides the batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_ext.config.run import RunConfig
from megatron_ext.disk.host_folder import RESIZE, is_under_torchrun
from megatron_ext.disk.reading import UnreadableFile, read_text
from megatron_ext.disk.writing import write_text
from megatron_ext.errors import ConfigError

REQUESTED_NODES = "elastic_nodes"
"""File in the save folder where an operator writes the requested number of nodes."""


def elastic_sizes(config: RunConfig, configure: Callable[[int], RunConfig]) -> tuple[int, ...]:
    """Return the numbers of ranks with which a run may continue, largest first.

    Without ``--elastic-min-nodes`` this is only the present number. With it, these are the ranks of
    all numbers of nodes (see `ranks_of_a_node`) from the present one down to the flag's value that
    fit the other flags; for example, the number of replicas must divide the global batch. If a
    number does not fit, it is left out if this program starts the ranks. Under torchrun, which
    chooses the number itself, it is an error.

    Args:
        configure: returns the configuration for a number of ranks, or raises a ConfigError.

    Raises:
        ConfigError: ``--elastic-min-nodes`` is above the number of nodes, or the flags do not fit
            the smallest number; under torchrun also if they do not fit one of the other numbers.
    """
    size = config.parallel.world_size
    fewest = config.fault_tolerance.elastic_min_nodes
    if fewest is None:
        return (size,)
    each = ranks_of_a_node(config)
    nodes = size // ranks_of_a_node(config)
    if fewest > nodes:
        raise ConfigError(
            f"`--elastic-min-nodes` ({fewest}) must be at most the number of nodes ({nodes}), each "
            f"of {each} ranks; use {nodes}, or start more."
        )
    sizes = [size]
    for number in range(nodes - 1, fewest - 1, -1):
        faults = list(_faults(config, configure, number * each))
        if not faults:
            sizes.append(number * each)
        elif number == fewest or is_under_torchrun():
            problem = f"`--elastic-min-nodes` ({fewest}) lets the run go on with {number} nodes"
            raise ConfigError(
                [f"{problem} ({number * each} ranks), but: {text.rstrip('.')}." for text in faults]
            )
    return tuple(sizes)


def ranks_of_a_node(config: RunConfig) -> int:
    """Return how many ranks a "node" has, the smallest unit by which a run grows or shrinks.

    Under torchrun this is the number of ranks on a machine, otherwise that of one model replica.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return config.parallel.world_size // config.parallel.data_parallel_size


def _faults(
    config: RunConfig, configure: Callable[[int], RunConfig], world_size: int
) -> Iterator[str]:
    """Yield a sentence for each reason why the run cannot continue with ``world_size`` ranks."""
    try:
        other = configure(world_size)
    except ConfigError as error:
        yield from error.messages
        return
    before = _batches(config)
    after = _batches(other)
    if before != after:
        yield (
            f"its steps would have {_listed(after)} samples instead of {_listed(before)}; give "
            "`--global-batch-size` a number that all numbers of replicas divide"
        )


def _batches(config: RunConfig) -> list[int]:
    """Return all numbers of samples that a step has at some time in the run, in ascending order."""
    replicas = config.parallel.data_parallel_size
    micro = config.training.batch_sizes[0]
    return [count * micro * replicas for count in config.training.microbatch_counts(replicas)]


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def requested_nodes(save: str) -> tuple[int, int] | None:
    """Return the number in the file `REQUESTED_NODES`, and when the file was written.

    An operator writes this file to the folder ``save`` to request a number of nodes. Its
    modification time, in nanoseconds, distinguishes two requests for the same number. Return None
    if there is no file, or no number in it.
    """
    path = Path(save) / REQUESTED_NODES
    try:
        return int(read_text(path, limit=1000)), path.stat().st_mtime_ns
    except (OSError, ValueError, UnreadableFile):
        return None


def ask_to_resize(folder: Path) -> None:
    """Ask this machine's ranks, by a file in the host folder, to save after their step and exit."""
    write_text(folder / RESIZE, "")


def forget_resize(folder: Path) -> None:
    """Delete the file of `ask_to_resize` from the host folder, after the ranks have ended."""
    (folder / RESIZE).unlink(missing_ok=True)
