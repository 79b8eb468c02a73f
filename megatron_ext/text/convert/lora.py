"""A checkpoint with adapters becomes one without: ``scale * B A`` is added to the weights.

The adapters of a checkpoint as a folder that Hugging Face's peft loads on its own model.
"""

from __future__ import annotations

import dataclasses
import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_ext.checkpoint.adapters import FrozenBase, load_adapters, stored_adapters
from megatron_ext.checkpoint.files import checksum_fault, read_manifest, standing_folder_of
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.stored import Found, choose, read_run_config, refusal, stored_progress
from megatron_ext.checkpoint.unpickling import read_tensors
from megatron_ext.config.checkpoint import CheckpointConfig
from megatron_ext.config.lora import LoraConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.device import Device
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.chunks import ModelChunk, build_chunks
from megatron_ext.layers.lora import merge_adapters
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext, init_groups, seed_everything
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.convert.names import RowShape, modules_of, row_shape, split_rows
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.video.convert.names import NAME as WAN_NAME
from megatron_ext.video.convert.names import wan_parts, wan_target


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


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model"
NETWORKS = ("generator", "critic")
Part = tuple[str, str, Tensor]
_NAME = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?:self_attention|mlp)\."
    r"(?P<linear>linear_\w+)\.lora\.(?P<matrix>[ab])$"
)


@dataclass(frozen=True)
class _Twin:
    """The model on the other side.

    Attributes:
        name: of those of our adapters that have a place in it.
        parts: one of our matrices as its layers', ``A`` or ``B``, and values.
        target: what peft is to call a layer, from its path.
        task: peft's name for what it does, None if it has none.
    """

    name: re.Pattern[str]
    parts: Callable[[str, Tensor], Iterator[Part]]
    target: Callable[[str], str]
    task: str | None


def export_adapters(
    root: Path,
    output: Path,
    *,
    step: int | None = None,
    base_model: str = "",
    network: str | None = None,
) -> list[str]:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``; needs no process group.

    Adapters of a GPT get the names of transformers' Llama, those of a streaming run the names of
    diffusers' WanTransformer3DModel; its ``load_lora_adapter`` finds scale and layers in the file
    by ``prefix="base_model.model"``.

    Args:
        root: ``--load``, a folder of checkpoints.
        output: a new or empty folder.
        step: iteration, None for the latest.
        base_model: name or path of the Hugging Face model that the adapters belong to.
        network: one of `NETWORKS` of a streaming run, None for the generator or the only one.

    Returns:
        Names of adapters that have no place in a Hugging Face model and were left out.

    Raises:
        CheckpointError: no whole checkpoint with adapters, no such network, no Llama-like MLP, or
            a folder that holds something.
    """
    from safetensors.torch import save_file

    run = RunConfig.from_dict(read_run_config(root, step))
    iteration = choose(root, step)
    assert iteration is not None
    _verify(root, iteration)
    path = standing_folder_of(root, iteration)
    names = [
        name
        for name in stored_adapters(path)
        if name.startswith("critic.") == (network == "critic")
    ]
    _check(run, names, root, output, network)
    twin = _twin(run, network)
    tensors, modules = {}, set()
    for name, matrix in read_tensors(path, [x for x in names if twin.name.match(x)]).items():
        for module, kind, values in twin.parts(name, matrix):
            modules.add(twin.target(module))
            tensors[f"{PREFIX}.{module}.lora_{kind}.weight"] = values.contiguous()
    description = _peft_config(run, sorted(modules), base_model, twin.task)
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / WEIGHTS, metadata=_metadata(description))
    (output / CONFIG).write_text(json.dumps(description, indent=2), encoding="utf-8")
    return [name for name in names if not twin.name.match(name)]


def _verify(root: Path, iteration: int) -> None:
    path = standing_folder_of(root, iteration)
    files = read_manifest(path) or {}
    fault = checksum_fault(path, files, files)
    if fault is not None:
        raise CheckpointError(refusal(root, iteration, fault))


def _check(
    run: RunConfig, names: Sequence[str], root: Path, output: Path, network: str | None
) -> None:
    check_network(run, root, network)
    if run.lora.lora_rank is None or not names:
        raise CheckpointError(
            f"`--load` ({root}) holds a model without adapters; give a run with `--lora-rank`."
        )
    has_mlp = any(".linear_fc" in name for name in names)
    if has_mlp and not run.model.swiglu and not run.video.streams:
        raise CheckpointError(
            f"`--load` ({root}) has adapters on an MLP without `--swiglu`, for which peft's models "
            "have no gate_proj and up_proj; merge them with `tools/lora.py merge` instead."
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"`--output` ({output}) is not empty; give a new folder.")


def check_network(run: RunConfig, root: Path, network: str | None) -> None:
    """Refuse the name of a network that a run does not have.

    Args:
        run: whose checkpoint it is.
        root: ``--load``.
        network: see `export_adapters`.

    Raises:
        CheckpointError: the run has one network only.
    """
    if network is not None and not run.video.streams:
        raise CheckpointError(
            f"`--network` ({network}) is for runs of `pretrain_video.py --task streaming`, but "
            f"`--load` ({root}) holds one model; leave it out."
        )


def _twin(run: RunConfig, network: str | None) -> _Twin:
    if not run.video.streams:
        return _Twin(
            _NAME,
            partial(_llama_parts, shape=row_shape(run)),
            lambda path: path.rpartition(".")[2],
            "CAUSAL_LM",
        )
    streaming = run.streaming
    head_dim = streaming.sizes(streaming.critic_size if network == "critic" else None).head_dim
    return _Twin(WAN_NAME, partial(wan_parts, head_dim=head_dim), wan_target, None)


def _llama_parts(name: str, matrix: Tensor, shape: RowShape) -> Iterator[Part]:
    """Path of Hugging Face's layer, ``A`` or ``B``, and its values."""
    match = _NAME.match(name)
    assert match is not None
    linear, kind = match["linear"], match["matrix"].upper()
    stacked = match["layer"] is None
    first = 0 if stacked else int(match["layer"])
    for layer, values in enumerate(matrix if stacked else matrix[None], first):
        if kind == "B":
            parts = split_rows(linear, values, shape)
        else:
            # safetensors refuses tensors that share memory.
            parts = {twin: values.clone() for twin in modules_of(linear)}
        for twin, part in parts.items():
            yield f"model.layers.{layer}.{twin}", kind, part


def _peft_config(
    run: RunConfig, modules: list[str], base_model: str, task: str | None
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": run.lora.lora_rank,
        "lora_alpha": run.lora.resolved(streams=run.video.streams).lora_alpha,
        "lora_dropout": run.lora.lora_dropout,
        "use_rslora": run.lora.lora_rslora,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _metadata(description: dict[str, Any]) -> dict[str, str]:
    """Header of the file: there diffusers looks for the configuration, named like the tensors."""
    own = {f"{PREFIX}.{name}": value for name, value in description.items()}
    return {"format": "pt", "lora_adapter_metadata": json.dumps(own)}
