"""Opens published weights of a video network, in each form in which they are published.

They lie in a folder of safetensors, in a single file of safetensors (ComfyUI's), or in a file of
torch.save (Self-Forcing's). Names may have the prefixes of modules that held the network, and
weights may be in 8 bits with a scale. `PlainTensors` gives the network's own names and values.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from megatron_ext.checkpoint.safetensors_files import (
    TensorFolder,
    check_dtype,
)
from megatron_ext.checkpoint.unpickling import plain_content
from megatron_ext.errors import CheckpointError

SAFETENSORS = ".safetensors"
SUFFIXES = (SAFETENSORS, ".pt", ".pth", ".bin")
"""The endings of files that `open_weights` reads."""

_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")
"""Parts that torch's wrappers (FSDP, checkpointing, compile) add to parameter names."""
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.")
"""Prefixes that the modules around a network add to all names, in ComfyUI and in Self-Forcing."""

_EIGHT_BITS = {"F8_E4M3": torch.float8_e4m3fn, "float8_e4m3fn": torch.float8_e4m3fn}
"""The name of an 8-bit dtype, as safetensors or torch spell it -> the dtype."""
_SCALES = (".scale_weight", ".weight_scale")
"""Endings of the names of scales: a weight in 8 bits times its scale is the network's weight."""
_ABOUT_INPUTS = (".scale_input", ".input_scale", ".comfy_quant")
"""Endings of tensors beside 8-bit weights which tell how to multiply them, and change no weight."""
_MARK = "scaled_fp8"
"""An empty tensor with which ComfyUI marks files of 8-bit weights with scales."""


@contextmanager
def open_weights(source: Path, entry: str | None, stem: str) -> Iterator[PlainTensors]:
    """Open a folder of safetensors or a file of weights; yield its tensors.

    Args:
        source: the folder or file.
        entry: key in a file of torch.save, as in `TensorFile`; None for other forms.
        stem: beginning of the names of the files in a folder.

    Raises:
        CheckpointError: the weights cannot be read, or ``entry`` is given for another form.
    """
    if source.is_file() and source.suffix != SAFETENSORS:
        yield PlainTensors(TensorFile(source, entry), source)
        return
    if entry is not None:
        kind = "a file of safetensors" if source.is_file() else "a folder"
        raise CheckpointError(
            f"`--entry {entry}` is for a file of torch.save, but {source} is {kind}; leave it out."
        )
    folder = source
    if source.is_file():
        folder = source.parent
        stem = source.name.removesuffix(SAFETENSORS)
    with TensorFolder(folder, stem) as tensors:
        yield PlainTensors(tensors, source)


class StoredTensors(Protocol):
    """Tensors as a folder or file holds them, under the names that it gives them."""

    @property
    def names(self) -> set[str]: ...

    def dtype(self, name: str) -> str: ...

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def tensor(self, name: str) -> Tensor: ...


class PlainTensors:
    """The tensors of a folder or file, under the network's own names and without 8-bit scales.

    ``place`` is the folder or file, for messages.
    """

    def __init__(self, source: StoredTensors, place: Path) -> None:
        self.folder = place
        self._source = source
        stored = {_WRAPPERS.sub("", name): name for name in source.names}
        for prefix in _PREFIXES:
            if stored and all(name.startswith(prefix) for name in stored):
                stored = {name.removeprefix(prefix): full for name, full in stored.items()}
                break
        self._scales = {
            f"{name.removesuffix(ending)}.weight": full
            for name, full in stored.items()
            for ending in _SCALES
            if name.endswith(ending)
        }
        beside = (*_SCALES, *_ABOUT_INPUTS)
        self._stored = {
            name: full
            for name, full in stored.items()
            if name != _MARK and not name.endswith(beside)
        }

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def dtypes(self) -> dict[str, str]:
        """Return each tensor's dtype by name, such as ``"bfloat16"`` or ``"float8_e4m3fn"``.

        CheckpointError is raised for a tensor that is neither a floating-point number of 16 or 32
        bits nor one of 8 bits.
        """
        kinds = {name: self._source.dtype(full) for name, full in self._stored.items()}
        for name, kind in kinds.items():
            if kind not in _EIGHT_BITS:
                check_dtype(self.folder, name, kind, kind)
        return {name: _torch_name(kind) for name, kind in kinds.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self._source.shapes()
        return {name: shapes[full] for name, full in self._stored.items()}

    def tensor(self, name: str) -> Tensor:
        """Return the tensor ``name``, which must exist; one of 8 bits as float32, scaled.

        A scale is one number, or one for each output ``[out]``; else CheckpointError is raised.
        """
        tensor = self._source.tensor(self._stored[name])
        if tensor.dtype not in _EIGHT_BITS.values():
            return tensor
        values = tensor.float()
        if name not in self._scales:
            return values
        scale = self._source.tensor(self._scales[name]).float()
        if scale.numel() not in (1, tensor.size(0)):
            raise CheckpointError(
                f"{self.folder} holds `{self._scales[name]}` with shape {list(scale.shape)}, which "
                "must be one number or one for each output; use the model before it was quantized."
            )
        return values * scale.reshape(-1, *[1] * (tensor.dim() - 1))


def _torch_name(kind: str) -> str:
    return str(_EIGHT_BITS[kind]).removeprefix("torch.") if kind in _EIGHT_BITS else kind


class TensorFile:
    """The tensors of a file of torch.save, mapped into memory.

    ``entry`` is the key under which the file holds the tensors, such as ``"generator_ema"``. None
    takes the whole file if it is a dictionary of tensors, else the only key that holds one.

    Raises:
        CheckpointError: the file cannot be read, ``entry`` holds no tensors, or ``entry`` is None
            and no key or several keys hold tensors.
    """

    def __init__(self, path: Path, entry: str | None) -> None:
        self._tensors = _chosen(path, entry)

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def dtype(self, name: str) -> str:
        return str(self._tensors[name].dtype).removeprefix("torch.")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
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


def _holds_tensors(value: object) -> TypeGuard[Mapping[str, Tensor]]:
    return isinstance(value, Mapping) and bool(value) and all(map(torch.is_tensor, value.values()))
