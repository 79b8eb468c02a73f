"""Checkpoints that load in any layout: written aside, verified, then published by one rename."""

from __future__ import annotations

from megatron_ext.checkpoint.loaded import LoadedCheckpoint
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.stored import read_run_config

__all__ = ["CheckpointManager", "LoadedCheckpoint", "read_run_config"]
