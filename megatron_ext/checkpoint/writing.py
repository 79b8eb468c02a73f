"""Writing the state of all ranks into one folder, so that no rank waits for one that failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.checkpoint.agreement import together
from megatron_ext.checkpoint.manifest import describe_file, make_durable
from megatron_ext.checkpoint.stored import PROGRESS, RUN_CONFIG
from megatron_ext.checkpoint.strategies import BACKEND, VERSION
from megatron_ext.checkpoint.unpickling import MetadataReader
from megatron_ext.errors import CheckpointError

Files = dict[str, dict[str, Any]]


def write_state(state: dict[str, Any], folder: Path, strategy: Any) -> None:
    """Write sharded and common state as `dist_checkpointing.save` does.

    megatron-core's own function lets rank 0 fail alone when the common state cannot be written;
    here each step that one rank does for all is agreed on.

    Raises:
        CheckpointError: on every rank, when one of them could not write.
    """
    sharded, common = save_preprocess(state)
    on_first_rank(lambda: torch.save(common, folder / COMMON_STATE_FNAME), COMMON_STATE_FNAME)
    try:
        strategy.save(sharded, folder)
    except CheckpointException as error:
        rank, cause = first_failure(error)
        raise CheckpointError(f"{folder} could not be written by rank {rank}: {cause}") from error
    on_first_rank(lambda: save_config(CheckpointingConfig(BACKEND, VERSION), str(folder)), "config")


def describe_written(folder: Path, progress: dict[str, Any], run_config: dict[str, Any]) -> Files:
    """Add the readable files, and list all files with size and checksum.

    Each rank reads back what it wrote; rank 0 also checks that the index of the shards is covered
    by the files.

    Raises:
        CheckpointError: on every rank, when a file cannot be read back or is too short.
    """
    rank = torch.distributed.get_rank()

    def describe() -> Files:
        mine = sorted(folder.glob(f"__{rank}_*"))
        if rank == 0:
            (folder / RUN_CONFIG).write_text(json.dumps(run_config, indent=1), encoding="utf-8")
            (folder / PROGRESS).write_text(json.dumps(progress, indent=1), encoding="utf-8")
            mine += [path for path in folder.iterdir() if not path.name.startswith("__")]
        for path in mine:
            make_durable(path)
        return {path.name: describe_file(path) for path in mine}

    files: Files = {}
    for part in together(describe, f"{folder} cannot be read back"):
        files.update(part)
    on_first_rank(lambda: _check_index(folder, files), f"{folder} cannot be read back")
    return files


def _check_index(folder: Path, files: Files) -> None:
    metadata = MetadataReader(str(folder)).read_metadata()
    for index, place in metadata.storage_data.items():
        size = files.get(place.relative_path, {"bytes": -1})["bytes"]
        if size < place.offset + place.length:
            raise CheckpointError(
                f"{folder / place.relative_path} is too short for `{index.fqn}`; the file system "
                "lost what was written, so give another `--save`."
            )


def on_first_rank(work: Callable[[], Any], what: str) -> None:
    """Work that rank 0 does for all, and that fails on all."""
    rank = torch.distributed.get_rank()
    together(lambda: (work(), None)[1] if rank == 0 else None, what)


def first_failure(error: CheckpointException) -> tuple[int, str]:
    """The first failing rank of a collective read or write, and the innermost message."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return rank, one_line(cause)


def one_line(error: BaseException) -> str:
    """The first line of a message, without its full stop."""
    if isinstance(error, CheckpointException) and error.failures:
        return first_failure(error)[1]
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(". ")


def refusal_within(error: BaseException) -> str | None:
    """The sentence of a rank that refused a file, None where something else failed."""
    if isinstance(error, CheckpointException) and error.failures:
        error = min(error.failures.items(), key=lambda item: item[0])[1][0]
    return str(error) if isinstance(error, CheckpointError) else None
