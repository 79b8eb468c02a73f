"""Finds processes that a scheduler has started on several nodes without a launcher of ranks.

Each of them would train a run of its own, and all in the same folder. Only processes with one of
the variables `SCHEDULED` import this.
"""

from __future__ import annotations

import os

from megatron_ext.errors import ConfigError
from megatron_ext.train.launch import SCHEDULED

_START = "python -m megatron_ext.train.torchrun"


def notes_on_nodes() -> list[str]:
    """Return a note if this process, no rank of a launcher, is one of several of a scheduler.

    Raises:
        ConfigError: they are torchrun's nodes, so they cannot be meant as separate runs.
    """
    for name, what in SCHEDULED.items():
        value = os.environ.get(name, "")
        # torchrun also takes the least and the most nodes, as in 2:8.
        count = value.rpartition(":")[2]
        if not count.isdecimal() or int(count) < 2:
            continue
        of_what = what.format(count=value)
        if name == "PET_NNODES":
            raise ConfigError(
                f"`{name}` ({value}) says that this process belongs to {of_what}, each of which "
                f"would train by itself without torchrun; start the program with `{_START} "
                "--no-python COMMAND`, which reads that variable."
            )
        return [
            f"This process belongs to {of_what} (`{name}`), but was not started by torchrun, so it "
            f"trains by itself; for one run on all of them start the program with `{_START}`."
        ]
    return []
