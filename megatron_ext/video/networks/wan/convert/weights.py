"""Imports weights of Wan 2.1 as a checkpoint of the video DiT.

The weights lie in a folder of safetensors, or in a file of torch.save. The peak memory is one copy
of the weights plus the tensors of one parameter.
"""

from __future__ import annotations

import dataclasses
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from tqdm import tqdm

from megatron_ext.checkpoint.conversion import (
    one_rank,
    only_dtype,
    refuse_checkpoints,
    save_imported,
)
from megatron_ext.checkpoint.safetensors_files import (
    TensorFolder,
    TensorSource,
    check_dtype,
    torch_dtype,
)
from megatron_ext.checkpoint.unpickling import plain_content
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.precision import PRECISIONS, PrecisionConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.video.config.rules import SECTIONS
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.convert import read_config
from megatron_ext.video.networks.wan.attention import VideoDiTOptions
from megatron_ext.video.networks.wan.config import VideoDiTSizes
from megatron_ext.video.networks.wan.convert.config import (
    WanModel,
    understand,
    understand_shapes,
)
from megatron_ext.video.networks.wan.convert.names import (
    Naming,
    from_wan,
    shapes,
    to_wan,
    wan_names,
)
from megatron_ext.video.networks.wan.model import VideoDiT
from megatron_ext.video.streaming.config import StreamingConfig

STEM = "diffusion_pytorch_model"
"""The beginning of the names of Wan's safetensors files, in diffusers and in the original."""
SUFFIXES = (".pt", ".pth", ".bin")
_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")
"""Parts that torch's wrappers (FSDP, checkpointing, compile) add to parameter names."""
_PREFIX = "model."
"""The prefix that Self-Forcing's wrapper module adds to parameter names."""


@contextmanager
def open_wan(source: Path, entry: str | None) -> Iterator[tuple[WanModel, TensorSource]]:
    """Open the model in a folder of safetensors or a file of torch.save; yield it and its tensors.

    ``entry`` selects the tensors in a torch.save file, as in `TensorFile`; it must be None for a
    folder. CheckpointError is raised if it is not, or if the model cannot be read or converted.
    """
    if source.is_file():
        tensors = TensorFile(source, entry)
        diffusers = any(name.startswith("condition_embedder.") for name in tensors.names)
        naming = Naming.DIFFUSERS if diffusers else Naming.ORIGINAL
        yield understand_shapes(tensors.shapes(), naming, source), tensors
        return
    if entry is not None:
        raise CheckpointError(
            f"`--entry {entry}` is for a file of torch.save, but {source} is a folder; leave it "
            "out."
        )
    model = understand(read_config(source), source / "config.json")
    with TensorFolder(source, STEM) as folder:
        yield model, folder


class TensorFile:
    """The tensors of a file of torch.save, mapped into memory.

    ``entry`` is the key under which the file holds the tensors, such as ``"generator_ema"``. None
    takes the whole file if it is a dictionary of tensors, else the only key that holds one.

    Raises:
        CheckpointError: the file cannot be read, ``entry`` holds no tensors, or ``entry`` is None
            and no key or several keys hold tensors.
    """

    def __init__(self, path: Path, entry: str | None) -> None:
        self.folder = path
        self._tensors = {_WRAPPERS.sub("", name): x for name, x in _chosen(path, entry).items()}
        if self._tensors and all(name.startswith(_PREFIX) for name in self._tensors):
            self._tensors = {name.removeprefix(_PREFIX): x for name, x in self._tensors.items()}

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors, without the prefixes that wrappers such as FSDP add."""
        return set(self._tensors)

    def dtypes(self) -> dict[str, str]:
        """Return each tensor's dtype, such as ``"bfloat16"``, by name.

        CheckpointError is raised for a quantized tensor.
        """
        dtypes = {name: str(x.dtype).removeprefix("torch.") for name, x in self._tensors.items()}
        for name, kind in dtypes.items():
            check_dtype(self.folder, name, kind, kind)
        return dtypes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """Return the tensor ``name``, which must exist."""
        return self._tensors[name]


def _chosen(path: Path, entry: str | None) -> Mapping[str, Tensor]:
    """Return the tensors, by name, that a file of torch.save holds under the key ``entry``.

    If ``entry`` is None, the whole file is taken if it is a dictionary of tensors, else the only
    key that holds one. CheckpointError is raised if no key or several keys hold one.
    """
    # No code that the file may hold is run. One from before torch 1.6 is no archive, and cannot be
    # mapped.
    content = plain_content(path, path, mmap=zipfile.is_zipfile(path))
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} must hold names and tensors; give another file.")
    if entry is None and _holds_tensors(content):
        return content
    entries = {str(k): v for k, v in content.items() if _holds_tensors(v)}
    keys = [entry] if entry is not None else list(entries)
    if len(keys) == 1 and keys[0] in entries:
        return entries[keys[0]]
    shown = ", ".join(sorted(entries)) or "none"
    if entry is not None:
        raise CheckpointError(
            f"{path} holds no weights under `--entry {entry}`; those that hold any: {shown}."
        )
    raise CheckpointError(
        f"{path} must hold weights, or one entry with weights, but those that do are: {shown}; "
        "choose by `--entry`, or give another file."
    )


def _holds_tensors(value: Any) -> TypeGuard[Mapping[str, Tensor]]:
    return isinstance(value, Mapping) and bool(value) and all(map(torch.is_tensor, value.values()))


def import_wan(
    source: Path, save: Path, dtype: str | None = None, entry: str | None = None
) -> tuple[str, str]:
    """Write Wan's weights as a checkpoint of iteration 0, which loads in any parallel layout.

    Args:
        source: folder with config.json and safetensors, or a file of torch.save.
        save: folder for the checkpoint.
        dtype: dtype of the checkpoint; None keeps that of the source.
        entry: key in a torch.save file; None takes the file's only dictionary of tensors.

    Returns:
        The named size of the model, and the dtype of the checkpoint, such as ``"bfloat16"``.

    Raises:
        CheckpointError: the model cannot be converted, or a folder cannot be read or written.
    """
    refuse_checkpoints(save)
    with open_wan(source, entry) as (model, tensors):
        check_tensors(model.sizes, model.naming, tensors)
        # Even where a dtype is given, a quantized model is refused: it would lack its scales.
        tensors.dtypes()
        dtype = dtype or only_dtype(tensors)
        config = run_config(model, dtype, save)
        with one_rank(config.training.seed) as context:
            # The whole model on the CPU, with arbitrary weights.
            kind = torch_dtype(dtype)
            transformer_config = TransformerConfig(
                **model.sizes.transformer_fields(),
                params_dtype=kind,
                use_cpu_initialization=True,
                perform_initialization=False,
            )
            chunk = VideoDiT.build(model.sizes, VideoDiTOptions(), transformer_config, context)
            fill(chunk.to(kind), model.naming, tensors)
            save_imported(chunk, config.checkpoint, context, config.to_dict())
    return model.size, dtype


def run_config(model: WanModel, dtype: str, save: Path) -> RunConfig:
    """Return the configuration to store in the checkpoint that is written to ``save``.

    It is that of a ``--task streaming`` run whose generator is ``model``, in ``dtype``.
    """
    streaming = StreamingConfig(generator_size=model.size, text_features=model.sizes.text_width)
    flags = {word.removeprefix("--"): True for word in PRECISIONS[dtype]}
    config = RunConfig(sections=tuple(kind() for kind in SECTIONS))
    return dataclasses.replace(
        config.with_section(streaming, VideoConfig(task="streaming")),
        model=streaming.described(config.model),
        precision=PrecisionConfig(**flags),
        checkpoint=CheckpointConfig(save=str(save), no_save_optim=True, no_save_rng=True),
    )


@torch.no_grad()
def fill(chunk: VideoDiT, naming: Naming, tensors: TensorSource) -> None:
    """Copy Wan's tensors into an unsharded model, one parameter at a time."""
    parameters = list(chunk.named_parameters())
    bar = tqdm(parameters, "Importing", unit="tensor", delay=1.0, leave=False, disable=None)
    for name, parameter in bar:
        parts = [tensors.tensor(full) for full in wan_names(name, naming)]
        parameter.copy_(from_wan(name, parts, chunk.sizes))


def check_tensors(sizes: VideoDiTSizes, naming: Naming, tensors: TensorSource) -> None:
    """Check that names and shapes of tensors are exactly those of a model of these sizes.

    A CheckpointError names the first tensor that is missing, has another shape, or is unknown.
    """
    actual = tensors.shapes()
    expected = dict[str, tuple[int, ...]]()
    for name, shape in shapes(sizes).items():
        parts = to_wan(name, torch.empty(shape, device="meta"), sizes)
        names = wan_names(name, naming)
        expected |= {full: tuple(part.shape) for full, part in zip(names, parts, strict=True)}
    for full, shape in expected.items():
        if full not in actual:
            raise CheckpointError(
                f"{tensors.folder} holds no `{full}`, which Wan 2.1 has; copy the whole model "
                "again."
            )
        if actual[full] != shape:
            raise CheckpointError(
                f"{tensors.folder} holds `{full}` with shape {list(actual[full])}, but the sizes "
                f"of the model imply {list(shape)}; copy the whole model again."
            )
    extra = sorted(actual.keys() - expected.keys())
    if extra:
        raise CheckpointError(
            f"{tensors.folder} holds `{extra[0]}`, which Wan 2.1 text to video does not have; use "
            "a model without it."
        )
