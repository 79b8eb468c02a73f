"""A checkpoint with adapters becomes one without: ``scale * B A`` is added to the weights."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from megatron.core.transformer.module import Float16Module

from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.config import RunConfig
from megatron_ext.config.checkpoint import CheckpointConfig
from megatron_ext.config.lora import LoraConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.device import Device
from megatron_ext.errors import CheckpointError
from megatron_ext.layout import Layout, ParallelContext, init_groups, seed_everything
from megatron_ext.models.chunks import ModelChunk, build_chunks
from megatron_ext.models.gpt import build_gpt_chunk
from megatron_ext.models.lora import merge_adapters
from megatron_ext.models.transformer_config import build_transformer_config


def merge_checkpoint(
    root: Path,
    save: Path,
    device: Device,
    *,
    step: int | None = None,
    build: ModelChunk = build_gpt_chunk,
) -> Path:
    """Merge in one process, which holds the whole model; its own groups are made and taken down.

    The new checkpoint has the iteration and the counters of the old one, and neither optimizer
    nor random states.

    Args:
        root: ``--load``, a folder of checkpoints.
        save: another folder.
        device: that the model is put on.
        step: iteration, None for the latest.
        build: the model of the run that saved.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: no whole checkpoint with adapters, or the same folder twice.
    """
    if root.resolve() == save.resolve():
        raise CheckpointError(f"`--save` ({save}) must be another folder than `--load`.")
    config = _config_on_one_rank(root, save, device, step)
    if config.lora.lora_rank is None:
        raise CheckpointError(
            f"`--load` ({root}) holds a model without adapters; there is nothing to merge."
        )
    torch_device = device.activate(0)
    with tempfile.TemporaryDirectory(prefix="megatron_ext_") as folder:
        context = init_groups(Layout(world_size=1), device, init_method=f"file://{folder}/store")
        try:
            seed_everything(context, config.training.seed)
            chunks = _chunks(config, context, build, torch_device)
            return _merge(config, context, chunks)
        finally:
            context.destroy()


def _config_on_one_rank(root: Path, save: Path, device: Device, step: int | None) -> RunConfig:
    stored = RunConfig.from_dict(read_run_config(root, step))
    checkpoint = CheckpointConfig(
        load=str(root),
        save=str(save),
        ckpt_step=step,
        no_save_optim=True,
        no_save_rng=True,
        no_load_optim=True,
        no_load_rng=True,
    )
    alone = dataclasses.replace(stored, parallel=ParallelConfig(), checkpoint=checkpoint)
    return alone.finalize(1, device.kind)


def _chunks(config: RunConfig, context: ParallelContext, build: ModelChunk, device: Any) -> Any:
    core = build_transformer_config(config)
    chunks = [chunk.to(device) for chunk in build_chunks(build, config, core, context)]
    if config.precision.bf16 or config.precision.fp16:
        return [Float16Module(core, chunk) for chunk in chunks]
    return chunks


def _merge(config: RunConfig, context: ParallelContext, chunks: Any) -> Path:
    checkpoints = CheckpointManager(config.checkpoint, context)
    loaded = checkpoints.load(model=chunks, optimizer=None, scheduler=None)
    assert loaded is not None
    merge_adapters(chunks)
    return checkpoints.save(
        loaded.iteration,
        model=chunks,
        optimizer=None,
        scheduler=None,
        progress=loaded.progress,
        run_config=dataclasses.replace(config, lora=LoraConfig()).to_dict(),
    )
