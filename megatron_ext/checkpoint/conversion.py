"""Parts that all conversions from and to public weights share, whatever the model.

A conversion runs in one process on the CPU, and what it imports becomes the checkpoint of iteration
0, which loads in any layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.files import (
    checksum_fault,
    published,
    read_manifest,
    standing_folder_of,
)
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.safetensors_files import TensorSource
from megatron_ext.checkpoint.stored import choose, refusal
from megatron_ext.config.checkpoint import CheckpointConfig
from megatron_ext.device import select
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.context import ParallelContext, init_groups, seed_everything
from megatron_ext.parallel.grid import Layout

PRECISIONS = {"float32": [], "bfloat16": ["--bf16"], "float16": ["--fp16"]}
"""Flags of a run whose weights have a dtype."""


@contextmanager
def one_rank(seed: int) -> Iterator[ParallelContext]:
    """Make the groups of a single rank, and take them down at the end.

    Raises:
        CheckpointError: several ranks were started.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:
        raise CheckpointError(
            f"Models are converted on one rank, but {os.environ['WORLD_SIZE']} were started; start "
            "the tool without torchrun."
        )
    device = select("gloo")
    device.activate(0)
    context = init_groups(Layout(1), device)
    try:
        seed_everything(context, seed)
        yield context
    finally:
        context.destroy()


def read_settings(path: Path, advice: str) -> dict[str, Any]:
    """Read the config.json of a model.

    Args:
        advice: what the user can do where the file cannot be read.

    Raises:
        CheckpointError: there is no such file, or it does not hold names and values.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {advice}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold names and values; give another folder.")
    return raw


def only_dtype(tensors: TensorSource) -> str:
    """Return the dtype that all tensors have, such as ``"bfloat16"``.

    Raises:
        CheckpointError: there are several, so that one would have to be rounded or widened.
    """
    found = sorted(set(tensors.dtypes().values()))
    if len(found) != 1:
        raise CheckpointError(
            f"{tensors.folder} holds tensors in {' and '.join(found) or 'no dtype'}, but a "
            "checkpoint has one dtype; give it as `--dtype`."
        )
    return found[0]


def refuse_checkpoints(save: Path) -> None:
    """Refuse to import a model into a folder that holds checkpoints.

    Raises:
        CheckpointError: the folder holds some.
    """
    if published(save):
        raise CheckpointError(f"`--save` ({save}) holds checkpoints; give a new folder.")


def save_imported(
    chunk: Any,
    config: CheckpointConfig,
    context: ParallelContext,
    run_config: dict[str, Any],
) -> None:
    """Save a whole model as the checkpoint of iteration 0."""
    CheckpointManager(config, context).save(
        0,
        model=[chunk],
        optimizer=None,
        scheduler=None,
        progress={"iteration": 0, "consumed_train_samples": 0},
        run_config=run_config,
    )


def verified_folder(root: Path, step: int | None) -> Path:
    """Return the folder of an iteration after comparing all of its checksums.

    Args:
        root: ``--load``.
        step: iteration, None for the latest.

    Raises:
        CheckpointError: a missing or damaged checkpoint.
    """
    iteration = choose(root, step)
    if iteration is None:
        raise CheckpointError(f"`--load` ({root}) holds no checkpoint; give another folder.")
    path = standing_folder_of(root, iteration)
    files = read_manifest(path) or {}
    fault = checksum_fault(path, files, files)
    if fault is not None:
        raise CheckpointError(refusal(root, iteration, fault))
    return path
