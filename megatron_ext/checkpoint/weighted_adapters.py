"""Adds several adapters with weights, as peft's ``add_weighted_adapter`` does, folder to folder.

The change of a layer's weight by adapter i is ``s_i B_i A_i``. The sum over adapters with weights
w_i becomes one adapter of scale 1:

======  =======================================================================  ==================
type    A and B of the result                                                    rank
======  =======================================================================  ==================
linear  sums of ``sign(w_i s_i) sqrt|w_i s_i| A_i`` and ``sqrt|w_i s_i| B_i``,   that of each
        whose product is not the sum of the changes, but near it if the
        adapters are alike
cat     ``[w_1 s_1 A_1; w_2 s_2 A_2; ...]`` and ``[B_1, B_2, ...]``: exact       their sum
svd     the largest singular values of the sum of the changes                    ``--svd-rank``
======  =======================================================================  ==================
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.checkpoint.adapter_files import (
    CONFIG,
    LowRank,
    check_output,
    check_settings,
    scale_of,
)
from megatron_ext.checkpoint.adapter_forms import FORMS, PREFIX, WEIGHTS
from megatron_ext.checkpoint.safetensors_files import TensorFolder
from megatron_ext.disk.reading import read_model_settings
from megatron_ext.disk.writing import cleared, write_text
from megatron_ext.errors import CheckpointError

Adapters = Mapping[str, LowRank]
"""The adapters of a folder by the path of their layer."""

_MATRIX = re.compile(rf"{re.escape(PREFIX)}\.(?P<layer>.+)\.lora_(?P<kind>[AB])\.weight")


def add_weighted(
    folders: Sequence[Path],
    weights: Sequence[float],
    output: Path,
    combination: str,
    svd_rank: int | None = None,
) -> None:
    """Write the weighted sum of the adapters in peft's folders as another such folder.

    A layer that some folders have no adapter for gets the sum of the others.

    Args:
        combination: ``linear``, ``cat`` or ``svd``.
        svd_rank: rank of the result of ``svd``; None for the largest of the adapters' ranks.

    Raises:
        CheckpointError: a folder cannot be read, or cannot be added to the others in this way.
    """
    from safetensors.torch import save_file

    if len(folders) != len(weights):
        raise CheckpointError(
            f"`--weights` has {len(weights)} numbers for {len(folders)} folders of `--adapters`; "
            "give one for each."
        )
    check_output(output, FORMS["peft"])
    settings = [
        read_model_settings(x / CONFIG, "save the adapters again with peft.") for x in folders
    ]
    adapters = [_adapters(*pair) for pair in zip(folders, settings, strict=True)]
    _check_alike(folders, settings, adapters, combination)
    largest = max(adapter.rank for x in adapters for adapter in x.values())
    layers = dict.fromkeys(layer for x in adapters for layer in x)
    tensors: dict[str, Tensor] = {}
    rank = 0
    pairs = {}
    for layer in layers:
        own = [(w, x[layer]) for w, x in zip(weights, adapters, strict=True) if layer in x]
        shapes = {(adapter.b.size(0), adapter.a.size(1)) for _, adapter in own}
        if len(shapes) > 1:
            raise CheckpointError(
                f"`--adapters` hold adapters of `{layer}` with {len(shapes)} sizes of its weight; "
                "give adapters of one model."
            )
        pairs[layer] = _COMBINATIONS[combination](own, svd_rank or largest)
        rank = max(rank, len(pairs[layer][0]))
    for layer, (a, b) in pairs.items():
        missing = rank - len(a)
        dtype = next(x[layer].a.dtype for x in adapters if layer in x)
        a = torch.nn.functional.pad(a, (0, 0, 0, missing)).to(dtype)
        b = torch.nn.functional.pad(b, (0, missing)).to(dtype)
        tensors[f"{PREFIX}.{layer}.lora_A.weight"] = a.contiguous()
        tensors[f"{PREFIX}.{layer}.lora_B.weight"] = b.contiguous()
    alike = all(x.keys() == adapters[0].keys() for x in adapters)
    described = {
        **settings[0],
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": settings[0].get("target_modules") if alike else sorted(layers),
        "inference_mode": True,
        "init_lora_weights": True,
    }
    if not alike:
        described |= {"layers_to_transform": None, "exclude_modules": None}
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / CONFIG, json.dumps(described, indent=2))
    save_file(tensors, cleared(output / WEIGHTS), metadata={"format": "pt"})


def _adapters(folder: Path, settings: Mapping[str, Any]) -> dict[str, LowRank]:
    """Return the adapters in a folder of peft."""
    check_settings(settings, folder)
    file = folder / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{folder} holds {CONFIG} without {WEIGHTS}; copy the folder again.")
    halves: dict[str, dict[str, Tensor]] = {}
    with TensorFolder(folder, file.stem) as tensors:
        for name in sorted(tensors.names):
            match = _MATRIX.fullmatch(name)
            if match is None:
                raise CheckpointError(
                    f"{file} holds `{name}`, which is no matrix of LoRA on a linear layer, so that "
                    "it cannot be added; merge each adapter into the weights instead."
                )
            halves.setdefault(match["layer"], {})[match["kind"]] = tensors.tensor(name)
    found = {}
    for layer, half in halves.items():
        a = half.get("A")
        b = half.get("B")
        if a is None or b is None or a.dim() != 2 or b.dim() != 2 or b.size(1) != len(a):
            raise CheckpointError(
                f"{file} holds no two matrices [rank, in] and [out, rank] of `{layer}`; copy the "
                "file again."
            )
        scale = scale_of(None, layer, len(a), settings, file)
        found[layer] = LowRank(a, b, scale)
    if not found:
        raise CheckpointError(f"{file} holds no LoRA adapters; give a folder of adapters.")
    return found


def _check_alike(
    folders: Sequence[Path],
    settings: Sequence[Mapping[str, Any]],
    adapters: Sequence[Adapters],
    combination: str,
) -> None:
    """Raise a CheckpointError if adapters are of several kinds, or of several ranks for linear."""
    for folder, other in zip(folders, settings, strict=True):
        for name in ("base_model_name_or_path", "fan_in_fan_out", "task_type"):
            if other.get(name) != settings[0].get(name):
                raise CheckpointError(
                    f"{folders[0]} says `{name}` {settings[0].get(name)!r}, but {folder} "
                    f"{other.get(name)!r}; give adapters of one model."
                )
    ranks = sorted({adapter.rank for x in adapters for adapter in x.values()})
    if combination == "linear" and len(ranks) > 1:
        raise CheckpointError(
            f"`--combination-type linear` needs adapters of one rank, but they have "
            f"{', '.join(map(str, ranks))}; give cat or svd."
        )


def _linear(own: Sequence[tuple[float, LowRank]], _rank: int) -> tuple[Tensor, Tensor]:
    a = torch.zeros_like(own[0][1].a, dtype=torch.float32)
    b = torch.zeros_like(own[0][1].b, dtype=torch.float32)
    for weight, adapter in own:
        factor = weight * adapter.scale
        root = abs(factor) ** 0.5
        a += adapter.a.float() * (root if factor >= 0 else -root)
        b += adapter.b.float() * root
    return a, b


def _cat(own: Sequence[tuple[float, LowRank]], _rank: int) -> tuple[Tensor, Tensor]:
    a = torch.cat([x.a.float() * (weight * x.scale) for weight, x in own])
    return a, torch.cat([x.b.float() for _, x in own], dim=1)


def _svd(own: Sequence[tuple[float, LowRank]], rank: int) -> tuple[Tensor, Tensor]:
    a, b = _cat(own, rank)
    # The change has no more singular values than A has rows: decompose the small product alone.
    left, left_triangle = torch.linalg.qr(b)
    right, right_triangle = torch.linalg.qr(a.t())
    u, values, v = torch.linalg.svd(left_triangle @ right_triangle.t(), full_matrices=False)
    return v[:rank] @ right.t(), left @ (u[:, :rank] * values[:rank])


_COMBINATIONS: dict[str, Callable[[Any, int], tuple[Tensor, Tensor]]] = {
    "linear": _linear,
    "cat": _cat,
    "svd": _svd,
}
