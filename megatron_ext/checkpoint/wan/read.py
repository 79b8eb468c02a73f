"""Opens what holds the tensors of Wan: a folder of safetensors, or a file of torch.save."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from megatron_ext.checkpoint.huggingface.read import DTYPES, TensorFolder, TensorSource
from megatron_ext.checkpoint.unpickling import plain_content
from megatron_ext.checkpoint.wan.config import (
    CLASS,
    WanModel,
    read_json,
    understand,
    understand_shapes,
)
from megatron_ext.checkpoint.wan.names import Naming
from megatron_ext.errors import CheckpointError

STEM = "diffusion_pytorch_model"
"""What the names of the safetensors files begin with, in both namings."""
SUFFIXES = (".pt", ".pth", ".bin")
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What torch's wrappers put into names; averages are saved with them."""
_PREFIX = "model."
"""Name of the network in Self-Forcing's wrapper of it."""


def is_wan(source: Path) -> bool:
    """Whether a model to import is one of Wan's kind, rather than one of transformers."""
    if source.is_file():
        return source.suffix in SUFFIXES
    is_pipeline = (source / "model_index.json").is_file()
    if not (source / "config.json").is_file():
        return is_pipeline
    return CLASS in read_json(source)


@contextmanager
def open_wan(source: Path, entry: str | None) -> Iterator[tuple[WanModel, TensorSource]]:
    """The model and its tensors.

    Args:
        source: folder with config.json and safetensors, or a file of torch.save.
        entry: of that file, such as ``"generator_ema"``; None takes the only one.

    Raises:
        CheckpointError: nothing that can be read, or a model that cannot be converted.
    """
    if source.is_file():
        tensors = TensorFile(source, entry)
        naming = Naming.ORIGINAL if _is_original(tensors.names) else Naming.DIFFUSERS
        yield understand_shapes(tensors.shapes(), naming, source), tensors
        return
    if entry is not None:
        raise CheckpointError(
            f"`--entry {entry}` is for a file of torch.save, but {source} is a folder; leave it "
            "out."
        )
    model = understand(read_json(source), source / "config.json")
    with TensorFolder(source, STEM) as folder:
        yield model, folder


def _is_original(names: set[str]) -> bool:
    return not any(name.startswith("condition_embedder.") for name in names)


class TensorFile:
    """The tensors of one entry of a file of torch.save, mapped into memory.

    Args:
        path: the file.
        entry: a key of it; None takes the only one that holds tensors.

    Raises:
        CheckpointError: a file that cannot be read, or several entries to choose from.
    """

    def __init__(self, path: Path, entry: str | None) -> None:
        self.folder = path
        self._tensors = {_bare(name): x for name, x in _chosen(path, entry).items()}
        if self._tensors and all(name.startswith(_PREFIX) for name in self._tensors):
            self._tensors = {name.removeprefix(_PREFIX): x for name, x in self._tensors.items()}

    @property
    def names(self) -> set[str]:
        """Names of all tensors, without what wrappers added."""
        return set(self._tensors)

    def dtypes(self) -> dict[str, str]:
        """Names of tensors to names of torch's dtypes.

        Raises:
            CheckpointError: numbers of another kind.
        """
        found = {name: str(x.dtype).removeprefix("torch.") for name, x in self._tensors.items()}
        for name, kind in found.items():
            if kind not in DTYPES.values():
                raise CheckpointError(
                    f"{self.folder} holds `{name}` as {kind}, which is no float32, bfloat16 or "
                    "float16; use the model before it was quantized."
                )
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names of tensors to their shapes."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """One tensor.

        Raises:
            CheckpointError: there is none of that name.
        """
        if name not in self._tensors:
            raise CheckpointError(
                f"{self.folder} holds no `{name}`, which Wan 2.1 has; copy the file again."
            )
        return self._tensors[name]


def _chosen(path: Path, entry: str | None) -> Mapping[str, Tensor]:
    """The tensors of an entry; a file may be one itself.

    Raises:
        CheckpointError: no such entry, or several to choose from.
    """
    content = _content(path)
    if entry is None and _holds_tensors(content):
        return content
    entries = {str(k): v for k, v in content.items() if _holds_tensors(v)}
    asked = [entry] if entry is not None else list(entries)
    if len(asked) == 1 and asked[0] in entries:
        return entries[asked[0]]
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


def _content(path: Path) -> Mapping[str, Any]:
    """What torch.save wrote, without running code that the file may hold.

    Raises:
        CheckpointError: a file that cannot be read so.
    """
    # The form before torch 1.6 is no archive, and cannot be mapped.
    content = plain_content(path, path, mmap=zipfile.is_zipfile(path))
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} must hold names and tensors; give another file.")
    return content


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
