"""Tells the checkpoints of the present run from older ones in ``--save``, so that it can go on.

A run that may be started again notes, when it starts for the first time, which checkpoints its
folder holds already. After a restart it goes on from the newest whole checkpoint that it has
written itself; without one it starts as it did for the first time.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint import files, storage
from megatron_ext.checkpoint.files import published, standing_folder_of
from megatron_ext.checkpoint.stored import CheckpointRef, fault_of
from megatron_ext.config.fault_tolerance import FaultToleranceConfig
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.faults.host import generation
from megatron_ext.parallel.collectives import from_all_ranks, on_first_rank
from megatron_ext.parallel.context import ParallelContext

RUN_VARIABLE = "MEGATRON_EXT_RUN_ID"
"""Environment variable with the name that a launcher gives to a run and its restarts."""
RECORD = ".run.json"
_ANY = "none"
"""Name that torchrun gives to every run for which its user gives none."""


def run_id() -> str:
    """Return the name that this run keeps over its restarts, which need not be its own alone."""
    return os.environ.get(RUN_VARIABLE) or os.environ.get("TORCHELASTIC_RUN_ID", _ANY)


def may_be_restarted(config: FaultToleranceConfig) -> bool:
    """Return whether a launcher may start the ranks of this run again, or has done so."""
    by_torchrun = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return bool(config.max_restarts or by_torchrun or config.is_elastic or generation())


def flags_to_go_on(config: RunConfig, context: ParallelContext) -> CheckpointConfig:
    """Return the flags with which this generation of the run loads; all ranks call this together.

    They are the given ones unless the run has been restarted and has written a checkpoint. A
    damaged checkpoint is told, and an older one is taken. The save folder must be locked.
    """
    checkpoint, faults = config.checkpoint, config.fault_tolerance
    if checkpoint.save is None or not may_be_restarted(faults):
        return checkpoint
    root = Path(checkpoint.save)
    # A node that has joined later was not restarted itself.
    restarts = max(from_all_ranks(generation(), None))
    again = restarts > 0 or (faults.is_elastic and run_id() != _ANY)
    own = on_first_rank(lambda: own_checkpoints(root, again=again), f"{root} cannot be read")
    for iteration in own:
        found = CheckpointRef(root, iteration, weights_only=False)
        try:
            storage.verify(found, context)
        except CheckpointError as error:
            if context.rank == 0:
                print(f"note: an older checkpoint is taken: {storage.one_line(error)}", flush=True)
            continue
        return dataclasses.replace(
            checkpoint,
            load=checkpoint.save,
            ckpt_step=iteration,
            resume_mode=None,
            finetune=False,
            no_load_optim=False,
            no_load_rng=False,
        )
    return checkpoint


def own_checkpoints(root: Path, *, again: bool) -> list[int]:
    """Return the whole checkpoints of this run in its save folder, newest first.

    Unless the run has been started ``again``, there are none, and the present ones are noted.
    """
    path, name = root / RECORD, run_id()
    record = _read(path)
    if again and record.get("run") == name:
        older = record.get("checkpoints", {})
        new = [i for i in published(root) if older.get(str(i)) != _written_at(root, i)]
        return [i for i in reversed(new) if fault_of(standing_folder_of(root, i)) is None]
    present = {str(iteration): _written_at(root, iteration) for iteration in published(root)}
    temporary = path.with_suffix(".tmp")
    files.write_durably(temporary, json.dumps({"run": name, "checkpoints": present}))
    os.replace(temporary, path)
    return []


def _written_at(root: Path, iteration: int) -> int:
    return standing_folder_of(root, iteration).stat().st_mtime_ns


def _read(path: Path) -> dict[str, Any]:
    """Return the record of the last run in the folder; an empty one if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
