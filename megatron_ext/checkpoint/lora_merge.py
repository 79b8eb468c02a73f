"""A checkpoint with adapters becomes one without: ``scale * B A`` is added to the weights."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.transformer.module import Float16Module

from megatron_ext.checkpoint.frozen import FrozenBase, load_adapters
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.stored import Found, choose, read_run_config, stored_progress
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


@dataclass(frozen=True)
class Network:
    """One of the networks in a checkpoint.

    Attributes:
        build: it.
        described: the configuration of a run, as the network is built from it.
        section: key of its state in the checkpoint, and what its names begin with; None for the
            model of the run.
        base: flag's value that says where the weights under its adapters lie.
    """

    build: ModelChunk
    described: Callable[[RunConfig], RunConfig] = lambda run: run
    section: str | None = None
    base: Callable[[RunConfig], str | None] = lambda run: run.checkpoint.pretrained_checkpoint


GPT = Network(build_gpt_chunk)


def merge_checkpoint(
    root: Path,
    save: Path,
    device: Device,
    *,
    step: int | None = None,
    network: Network = GPT,
    base: str | None = None,
) -> Path:
    """Merge in one process, which holds the whole model; its own groups are made and taken down.

    The new checkpoint has the iteration and the counters of the old one, and neither optimizer
    nor random states.

    Args:
        root: ``--load``, a folder of checkpoints.
        save: another folder.
        device: that the model is put on.
        step: iteration, None for the latest.
        network: of the run that saved.
        base: checkpoints with the weights under the adapters, where these were saved alone; None
            for where the run found them.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: no whole checkpoint with adapters, other weights than those that were
            under them, or the same folder twice.
    """
    if root.resolve() == save.resolve():
        raise CheckpointError(f"`--save` ({save}) must be another folder than `--load`.")
    stored = RunConfig.from_dict(read_run_config(root, step))
    if base is not None and FrozenBase.of_run(stored) is None:
        raise CheckpointError(
            f"`--pretrained-checkpoint` ({base}) has no effect: `--load` ({root}) holds all "
            "weights itself; leave it out."
        )
    config = _on_one_rank(stored, root, save, device, step, base or network.base(stored))
    if config.lora.lora_rank is None:
        raise CheckpointError(
            f"`--load` ({root}) holds a model without adapters; there is nothing to merge."
        )
    config = network.described(config)
    torch_device = device.activate(0)
    context = init_groups(Layout(world_size=1), device)
    try:
        seed_everything(context, config.training.seed)
        chunks = _chunks(config, context, network.build, torch_device)
        return _merge(config, context, chunks, network.section)
    finally:
        context.destroy()


def _on_one_rank(
    stored: RunConfig, root: Path, save: Path, device: Device, step: int | None, base: str | None
) -> RunConfig:
    checkpoint = CheckpointConfig(
        load=str(root),
        save=str(save),
        ckpt_step=step,
        pretrained_checkpoint=base,
        pretrained_average=stored.checkpoint.pretrained_average,
        no_save_optim=True,
        no_save_rng=True,
        no_load_optim=True,
        no_load_rng=True,
    )
    alone = dataclasses.replace(stored, parallel=ParallelConfig(), checkpoint=checkpoint)
    return alone.resolved(1, device.kind)


def _chunks(config: RunConfig, context: ParallelContext, build: ModelChunk, device: Any) -> Any:
    core = build_transformer_config(config)
    chunks = [chunk.to(device) for chunk in build_chunks(build, config, core, context)]
    if config.precision.bf16 or config.precision.fp16:
        return [Float16Module(core, chunk) for chunk in chunks]
    return chunks


def _merge(config: RunConfig, context: ParallelContext, chunks: Any, section: str | None) -> Path:
    if section is None:
        iteration, progress = _load_model(config, context, chunks)
    else:
        iteration, progress = _load_section(config, context, chunks, section)
    merge_adapters(chunks)
    return CheckpointManager(config.checkpoint, context).save(
        iteration,
        model=chunks,
        optimizer=None,
        scheduler=None,
        progress=progress,
        run_config=dataclasses.replace(config, lora=LoraConfig()).to_dict(),
    )


def _load_model(
    config: RunConfig, context: ParallelContext, chunks: Any
) -> tuple[int, dict[str, Any]]:
    """Iteration and counters, after loading the run's own model."""
    manager = CheckpointManager(config.checkpoint, context, FrozenBase.of_run(config))
    loaded = manager.load(model=chunks, optimizer=None, scheduler=None)
    assert loaded is not None
    return loaded.iteration, loaded.progress


def _load_section(
    config: RunConfig, context: ParallelContext, chunks: Any, section: str
) -> tuple[int, dict[str, Any]]:
    """The same for another network, first what is under its adapters."""
    root = Path(str(config.checkpoint.load))
    iteration = choose(root, config.checkpoint.ckpt_step)
    assert iteration is not None
    found = Found(root, iteration, weights_only=False)
    base, given = FrozenBase.of_run(config), config.checkpoint.pretrained_checkpoint
    if given is not None:
        base = FrozenBase.given(given, average=config.checkpoint.pretrained_average)
        under = dataclasses.replace(config.checkpoint, load=None, ckpt_step=None)
        manager = CheckpointManager(under, context, section=section)
        manager.load(model=chunks, optimizer=None, scheduler=None)
    assert base is not None
    load_adapters(found, base, chunks, section, config.checkpoint, context)
    return iteration, stored_progress(found.path, Namespace())
