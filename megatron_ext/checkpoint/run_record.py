"""Distinguishes the checkpoints of the present run from older ones in ``--save``, for a restart.

A run that may be restarted notes at its first start which checkpoints its folder already holds.
After a restart, `resume` prefers the checkpoints that the run has written since then, whatever
state it started from.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint import files
from megatron_ext.checkpoint.files import published, standing_folder_of
from megatron_ext.config.fault_tolerance import FaultToleranceConfig
from megatron_ext.disk.reading import UnreadableFile, read_json_object

RUN_VARIABLE = "MEGATRON_EXT_RUN_ID"
"""Environment variable: the name that a launcher gives to a run and its restarts."""
RECORD = ".run.json"
_ANY = "none"
"""The run id that torchrun uses if the user gives none, so that many runs share it."""


def run_id() -> str:
    """Return the id that this run keeps when it is restarted; it need not be unique among runs."""
    return os.environ.get(RUN_VARIABLE) or os.environ.get("TORCHELASTIC_RUN_ID", _ANY)


def goes_on(config: FaultToleranceConfig, restarts: int) -> bool:
    """Return whether this start of the run is a restart.

    Every start of an elastic run counts as one if the user gave the run an id, because ``restarts``
    may be too low there: a torchrun agent that joins late does not know of earlier restarts.

    Args:
        restarts: the number of restarts that this process knows of.
    """
    return restarts > 0 or (config.is_elastic and run_id() != _ANY)


def own_checkpoints(root: Path, *, again: bool) -> list[int]:
    """Return the iterations of the checkpoints that this run wrote to ``root``, newest first.

    Some may be damaged. At the first start of a run the list is empty, and a file in ``root`` then
    records which checkpoints are already there, since they belong to other runs.

    Args:
        again: whether the run has been restarted.
    """
    path = root / RECORD
    name = run_id()
    record = _read(path)
    if again and record.get("run") == name:
        older = record.get("checkpoints")
        older = older if isinstance(older, dict) else {}
        new = [i for i in published(root) if older.get(str(i)) != _written_at(root, i)]
        return new[::-1]
    present = {str(iteration): _written_at(root, iteration) for iteration in published(root)}
    temporary = path.with_suffix(".tmp")
    files.write_durably(temporary, json.dumps({"run": name, "checkpoints": present}))
    os.replace(temporary, path)
    return []


def _written_at(root: Path, iteration: int) -> int:
    return standing_folder_of(root, iteration).stat().st_mtime_ns


def _read(path: Path) -> dict[str, Any]:
    """Return the content of the file `RECORD`; {} if it is missing or unreadable."""
    try:
        return read_json_object(path)
    except UnreadableFile:
        return {}
