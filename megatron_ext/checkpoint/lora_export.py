"""The adapters of a checkpoint as a folder that Hugging Face's peft loads on its own model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_ext.checkpoint.adapters import stored_adapters
from megatron_ext.checkpoint.huggingface import RowShape, split_rows
from megatron_ext.checkpoint.huggingface.names import modules_of
from megatron_ext.checkpoint.huggingface.single_rank import row_shape
from megatron_ext.checkpoint.manifest import checksum_fault, read_manifest
from megatron_ext.checkpoint.paths import standing_folder_of
from megatron_ext.checkpoint.stored import choose, read_run_config, refusal
from megatron_ext.config import RunConfig
from megatron_ext.errors import CheckpointError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_NAME = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?:self_attention|mlp)\."
    r"(?P<linear>linear_\w+)\.lora\.(?P<matrix>[ab])$"
)


def export_adapters(
    root: Path, output: Path, *, step: int | None = None, base_model: str = ""
) -> list[str]:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``; needs no process group.

    Args:
        root: ``--load``, a folder of checkpoints.
        output: a new or empty folder.
        step: iteration, None for the latest.
        base_model: name or path of the Hugging Face model that the adapters belong to.

    Returns:
        Names of adapters that have no place in a Hugging Face model and were left out.

    Raises:
        CheckpointError: no whole checkpoint with adapters, no Llama-like MLP, or a folder that
            holds something.
    """
    from safetensors.torch import save_file

    run = RunConfig.from_dict(read_run_config(root, step))
    iteration = choose(root, step)
    assert iteration is not None
    _verify(root, iteration)
    names = stored_adapters(standing_folder_of(root, iteration))
    _check(run, names, root, output)
    output.mkdir(parents=True, exist_ok=True)
    tensors, modules = {}, set()
    for name, matrix in _read(standing_folder_of(root, iteration), names).items():
        for layer, twin, kind, values in _parts(name, matrix, row_shape(run)):
            modules.add(twin.rpartition(".")[2])
            key = f"base_model.model.model.layers.{layer}.{twin}.lora_{kind}.weight"
            tensors[key] = values.contiguous()
    save_file(tensors, output / WEIGHTS, metadata={"format": "pt"})
    description = json.dumps(_peft_config(run, sorted(modules), base_model), indent=2)
    (output / CONFIG).write_text(description, encoding="utf-8")
    return [name for name in names if not _NAME.match(name)]


def _verify(root: Path, iteration: int) -> None:
    path = standing_folder_of(root, iteration)
    files = read_manifest(path) or {}
    fault = checksum_fault(path, files, files)
    if fault is not None:
        raise CheckpointError(refusal(root, iteration, fault))


def _check(run: RunConfig, names: list[str], root: Path, output: Path) -> None:
    if run.lora.lora_rank is None or not names:
        raise CheckpointError(
            f"`--load` ({root}) holds a model without adapters; give a run with `--lora-rank`."
        )
    has_mlp = any(".linear_fc" in name for name in names)
    if has_mlp and not run.model.swiglu:
        raise CheckpointError(
            f"`--load` ({root}) has adapters on an MLP without `--swiglu`, for which peft's models "
            "have no gate_proj and up_proj; merge them with `tools/lora.py merge` instead."
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"`--output` ({output}) is not empty; give a new folder.")


def _read(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Whole matrices by name, with a leading dimension of layers where these are stacked."""
    stored: Any = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
        for name in names
        if _NAME.match(name)
    }
    load(state, storage_reader=FileSystemReader(str(path)), no_dist=True)
    return state


def _parts(name: str, matrix: Tensor, shape: RowShape) -> Iterator[tuple[int, str, str, Tensor]]:
    """Layer, Hugging Face's module, ``A`` or ``B``, and its values."""
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
            yield layer, twin, kind, part


def _peft_config(run: RunConfig, modules: list[str], base_model: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": run.lora.lora_rank,
        "lora_alpha": run.lora.resolved().lora_alpha,
        "lora_dropout": run.lora.lora_dropout,
        "use_rslora": run.lora.lora_rslora,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
    }
