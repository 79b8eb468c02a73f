"""Functions that all model conversions share: importing weights, and merging adapters.

A conversion runs in one process. Imported public weights become the checkpoint of iteration 0,
which loads in any layout. Each kind of model declares how to build its networks (`Network`). A
CheckpointError is raised for a model that cannot be converted.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_ext.checkpoint import publish
from megatron_ext.checkpoint.adapters import MARK, FrozenBase, load_adapters
from megatron_ext.checkpoint.files import published
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.prepared import SavePreparer
from megatron_ext.checkpoint.state import common_state, content_metadata, sharding_of
from megatron_ext.checkpoint.stored import CheckpointRef, check_files, choose, stored_progress
from megatron_ext.checkpoint.writing import Value, write_common, write_shards
from megatron_ext.config.finalize import derived
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.device import Device, select
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.chunks import ModelChunk, build_chunks
from megatron_ext.layers.fp8.scaling import HISTORY
from megatron_ext.layers.initialization import Shard, shards_of
from megatron_ext.layers.lora import merge_adapters
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext, init_groups, seed_everything
from megatron_ext.parallel.grid import Layout


@contextmanager
def one_rank(seed: int, device: Device | None = None) -> Iterator[ParallelContext]:
    """Yield the parallel context of a single rank on ``device``, and destroy it afterwards.

    A ``device`` of None is the CPU. All random generators are seeded with ``seed``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:
        raise CheckpointError(
            f"Models are converted on one rank, but {os.environ['WORLD_SIZE']} were started; start "
            "the tool without torchrun."
        )
    device = device or select("gloo")
    device.activate(0)
    context = init_groups(Layout(1), device)
    try:
        seed_everything(context, seed)
        yield context
    finally:
        context.destroy()


def weight_shards(
    chunk: torch.nn.Module,
    tensor_of: Callable[[Tensor], Tensor | None] = lambda parameter: parameter,
) -> Iterator[Shard]:
    """Yield this rank's shards of the weights and buffers that a published model also has.

    ``chunk`` is a model chunk without wrappers. LoRA adapters and fp8 scale histories are left out.
    ``tensor_of`` is that of `shards_of`.
    """
    for shard in shards_of(chunk, tensor_of, buffers=True):
        if MARK not in shard.name and not shard.name.endswith(HISTORY):
            yield shard


def refuse_checkpoints(save: Path) -> None:
    """Raise a CheckpointError if the folder for an imported model already holds checkpoints."""
    if published(save):
        raise CheckpointError(f"`--save` ({save}) holds checkpoints; give a new folder.")


def save_imported(
    chunk: Any, config: CheckpointConfig, context: ParallelContext, run_config: dict[str, Any]
) -> None:
    """Save a whole model as the checkpoint of iteration 0 in the folder ``config.save``.

    ``run_config`` is the run's configuration, by section and field, to store in the checkpoint.
    """
    progress = {"iteration": 0, "consumed_train_samples": 0}
    manager = CheckpointManager(config, context)
    manager.save(0, model=[chunk], progress=progress, run_config=run_config)


def save_streamed(
    chunk: Any,
    root: Path,
    context: ParallelContext,
    read: Callable[[str], Tensor],
    run_config: dict[str, Any],
) -> None:
    """Save a whole model as the checkpoint of iteration 0 in ``root``, one parameter at a time.

    Args:
        chunk: the model of the only rank, whose parameters are on the meta device.
        read: takes the name of a parameter in the checkpoint, and returns its values in the dtype
            of the model. It is called when the parameter is written; nothing keeps the result.
        run_config: the run's configuration, by section and field, to store in the checkpoint.
    """
    progress = {"iteration": 0, "consumed_train_samples": 0}
    metadata = content_metadata(None, reshardable=True)
    model = chunk.sharded_state_dict(metadata=sharding_of(metadata, context))
    for entry in model.values():
        if isinstance(entry, ShardedTensor):
            # It has the shape of the parameter, but only one value, so that it takes no memory.
            entry.data = torch.empty(1, dtype=entry.dtype).expand(entry.local_shape)
    state = {
        "model": model,
        "content_metadata": metadata,
        **common_state(0, progress, run_config),
    }
    prepared = SavePreparer(CheckpointConfig(save=str(root)), []).prepare(state)
    plan = prepared.plan
    assert plan.metadata is not None
    values: list[Value] = [
        partial(read, item.index.fqn) if isinstance(value, Tensor) else value
        for item, value in zip(plan.items.items, prepared.values, strict=True)
    ]
    publish.prepare(root, 0)
    temporary = publish.temporary_folder_of(root, 0)
    try:
        written, files = write_shards(temporary, plan.items, values)
        files |= write_common(
            temporary, prepared.common, progress, run_config, plan.metadata, [written]
        )
        publish.publish(root, 0, files)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            root.rmdir()  # if it is new and holds nothing
        raise


def verified_folder(root: Path, step: int | None) -> Path:
    """Check the checksums of a checkpoint in ``root``, and return its folder.

    A ``step`` of None stands for the latest checkpoint.
    """
    iteration = choose(root, step)
    if iteration is None:
        raise CheckpointError(f"`--load` ({root}) holds no checkpoint; give another folder.")
    checkpoint = CheckpointRef(root, iteration, weights_only=False)
    check_files(checkpoint)
    return checkpoint.path


@dataclass(frozen=True)
class Network:
    """One of the networks in a checkpoint: the model that a run trains, or a second one.

    Attributes:
        build: builds a chunk of the network.
        described: takes a run's configuration, and returns the configuration that describes this
            network. The default returns it unchanged: it describes the model that the run trains.
        section: key of a second network's state in a checkpoint, and prefix of its tensors' names;
            None for the model that the run trains.
        base: takes the configuration of a run, and returns the folder of checkpoints that holds the
            frozen weights under the network's adapters; by default ``--pretrained-checkpoint``.
        fill: takes a run's configuration, chunks of the network, the folder or file of published
            weights, which it loads, and the parallel context; it returns their identity. None if
            there are none.
        is_published: whether a path is one of published weights instead of checkpoints.
    """

    build: ModelChunk
    described: Callable[[RunConfig], RunConfig] = lambda run: run
    section: str | None = None
    base: Callable[[RunConfig], str | None] = lambda run: run.checkpoint.pretrained_checkpoint
    fill: Callable[[RunConfig, Any, str, ParallelContext], FrozenBase] | None = None
    is_published: Callable[[str], bool] = lambda path: False


def merge_checkpoint(
    stored: RunConfig,
    network: Network,
    root: Path,
    save: Path,
    device: Device,
    *,
    step: int | None = None,
    base: str | None = None,
) -> Path:
    """Merge a checkpoint's adapters into the weights under them, in one process.

    Return the folder of the merged checkpoint in ``save``. The merged checkpoint has the same
    training counters as the old one, but no optimizer state and no random states.

    Args:
        stored: the configuration of the run that saved the old checkpoint.
        network: the network whose adapters are merged.
        root: folder of checkpoints that holds the old one.
        save: folder for the merged checkpoint; it must differ from ``root``.
        step: iteration of the old checkpoint; None for the latest.
        base: if the adapters were saved without the weights under them, the folder of checkpoints,
            or of published weights, with these weights; None for the folder that the run used.
    """
    if root.resolve() == save.resolve():
        raise CheckpointError(f"`--save` ({save}) must be another folder than `--load`.")
    recorded = FrozenBase.under(root, step)
    adapters_alone = recorded is not None
    if base is not None and not adapters_alone:
        raise CheckpointError(
            f"`--pretrained-checkpoint` ({base}) has no effect: `--load` ({root}) holds all "
            "weights itself; leave it out."
        )
    given = base or network.base(stored)
    if given is None and recorded is not None and recorded.flag is not None:
        given = recorded.path
    published = given is not None and network.is_published(given)
    checkpoint = CheckpointConfig(
        load=str(root),
        save=str(save),
        ckpt_step=step,
        pretrained_checkpoint=None if published else given,
        pretrained_average=stored.checkpoint.pretrained_average,
        no_save_optim=True,
        no_save_rng=True,
        no_load_optim=True,
        no_load_rng=True,
    )
    config = dataclasses.replace(stored, parallel=ParallelConfig(), checkpoint=checkpoint)
    config = derived(config, 1, device.kind)
    if config.lora.lora_rank is None:
        raise CheckpointError(
            f"`--load` ({root}) holds a model without adapters; there is nothing to merge."
        )
    config = network.described(config)
    with one_rank(config.training.seed, device) as context:
        drawn = FrozenBase.drawn(config.training.seed) if adapters_alone else None
        chunks = _build(config, context, network.build, device)
        if published and network.fill is not None:
            drawn = network.fill(config, chunks, str(given), context)
        iteration, progress = _load(config.checkpoint, context, chunks, drawn, network.section)
        merge_adapters(chunks)
        merged = dataclasses.replace(config, lora=LoraConfig()).to_dict()
        manager = CheckpointManager(config.checkpoint, context)
        return manager.save(iteration, model=chunks, progress=progress, run_config=merged)


def _build(config: RunConfig, context: ParallelContext, build: ModelChunk, device: Device) -> Any:
    transformer_config = build_transformer_config(config)
    chunks = build_chunks(build, config, transformer_config, context)
    chunks = [chunk.to(device.kind) for chunk in chunks]
    if config.precision.bf16 or config.precision.fp16:
        return [Float16Module(transformer_config, chunk) for chunk in chunks]
    return chunks


def _load(
    config: CheckpointConfig,
    context: ParallelContext,
    chunks: Any,
    base: FrozenBase | None,
    section: str | None,
) -> tuple[int, dict[str, Any]]:
    """Load the weights of a run's model, or of its second network ``section``, from a checkpoint.

    Return the iteration and the training counters of the checkpoint.

    Args:
        config: says which checkpoint to load, and where the frozen weights are.
        base: identity of the frozen weights, if the checkpoint holds only adapters.
        section: key of the second network's state; None for the run's model.
    """
    if section is None:
        manager = CheckpointManager(config, context, base)
        loaded = manager.load(model=chunks)
        assert loaded is not None
        return loaded.iteration, loaded.progress
    root = Path(str(config.load))
    given = config.pretrained_checkpoint
    iteration = choose(root, config.ckpt_step)
    assert iteration is not None and base is not None
    checkpoint = CheckpointRef(root, iteration, weights_only=False)
    if given is not None:
        base = FrozenBase.given(given, average=config.pretrained_average)
        under = dataclasses.replace(config, load=None, ckpt_step=None)
        CheckpointManager(under, context, section=section).load(model=chunks)
    load_adapters(checkpoint, base, chunks, section, config, context)
    return iteration, stored_progress(checkpoint.path, Namespace())
