"""Checks before any process group exists: folders, checkpoints and the task's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.resume import check_resume
from megatron_ext.checkpoint.stored import check_start
from megatron_ext.config.run import RunConfig
from megatron_ext.data.folders import why_not_writable
from megatron_ext.errors import ConfigError
from megatron_ext.losses.custom import load_loss
from megatron_ext.train.task import Preflight


def check_folders(config: RunConfig) -> None:
    """Check that the folders which a run writes to can be written.

    Raises:
        ConfigError: has one sentence for each folder that cannot.
    """
    logs = config.logging
    folders = {"save": config.checkpoint.save, "tensorboard-dir": logs.tensorboard_dir}
    if logs.wandb_project and logs.wandb_save_dir:
        folders["wandb-save-dir"] = logs.wandb_save_dir
    reasons = {
        (name, folder): why_not_writable(Path(folder)) for name, folder in folders.items() if folder
    }
    found = [
        f"`--{name}` ({folder}) cannot be written ({reason}); give a folder that can."
        for (name, folder), reason in reasons.items()
        if reason is not None
    ]
    if found:
        raise ConfigError(found)


def preflight(config: RunConfig, check_data: Preflight) -> tuple[RunConfig, Any]:
    """Check folders, checkpoints and data, the same on every rank.

    Args:
        config: the resolved configuration.
        check_data: the task's own check, see `Task.preflight`.

    Returns:
        The configuration with what the data decides, and the task's assets.

    Raises:
        CheckpointError: see `check_start` and `check_resume`.
        ConfigError, DataError: see `check_folders`, `load_loss` and the task's check.
    """
    if not config.planning.dry_run:
        check_folders(config)
    check_start(config.checkpoint, initializes=config.model.perform_initialization)
    if config.loss.loss is not None:
        load_loss(config.loss.loss, tuple(config.loss.loss_args))
    config, assets = check_data(config)
    check_resume(config)
    return config, assets
