"""Opens published weights of a video network, in each form in which they are published.

They lie in a folder of files of safetensors or torch.save, in a single file of safetensors
(ComfyUI's), or in one of torch.save (Self-Forcing's, Tencent's). Names may have the prefixes of
modules that held the network, and weights may be in 8 bits with a scale. `PlainTensors` gives the
network's own names and values.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from megatron_ext.checkpoint.safetensors_files import (
    SAFETENSORS,
    TensorFolder,
    check_dtype,
    file_of_each,
    index_of,
    index_path,
)
from megatron_ext.checkpoint.unpickling import plain_content
from megatron_ext.disk.reading import UnreadableFile, parse_json
from megatron_ext.errors import CheckpointError

PICKLED = ".bin"
"""The ending of files of torch.save in folders of diffusers."""
_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")
"""Parts that torch's wrappers (FSDP, checkpointing, compile) add to parameter names."""
_IN_PIPELINE = "model.diffusion_model."
"""The prefix of the network in a file of ComfyUI that may hold a whole pipeline."""
_PREFIXES = (
    _IN_PIPELINE, "diffusion_model.", "module.", "model.", "pipe.dit.", "dit.", "transformer.",
    "net.", "denoiser.",
)  # fmt: skip
"""Prefixes that the modules around a network add to all names, in ComfyUI and in trainers."""
_BESIDE = ("vae.", "first_stage_model.", "text_encoders.", "cond_stage_model.", "conditioner.")
"""Prefixes of other models in a file of ComfyUI that holds a whole pipeline."""

_EIGHT_BITS = {
    "F8_E4M3": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "float8_e5m2": torch.float8_e5m2,
}
"""The name of an 8-bit dtype, as safetensors or torch spell it -> the dtype."""
_ROWS_AT_A_TIME = 128
"""Rows of an 8-bit weight that are multiplied by their scale at a time, to save memory."""
_SCALES = (".scale_weight", ".weight_scale")
"""Endings of the names of scales: a weight in 8 bits times its scale is the network's weight."""
_DESCRIBED = ".comfy_quant"
"""Ending of the names of ComfyUI's descriptions of quantized weights: JSON as a tensor of bytes."""
_IN_HEADER = "_quantization_metadata"
"""Entry in the header of a file of safetensors with the same descriptions of all layers."""
_ABOUT_INPUTS = (".scale_input", ".input_scale", _DESCRIBED)
"""Endings of tensors beside 8-bit weights which tell how to multiply them, and change no weight."""
_MARK = "scaled_fp8"
"""An empty tensor with which ComfyUI marks files of 8-bit weights with scales."""


@contextmanager
def open_file(path: Path, entry: str | None, flag: str = "--entry") -> Iterator[PlainTensors]:
    """Open a file of weights, of safetensors or of torch.save; yield its tensors.

    Args:
        entry: key in a file of torch.save, as in `TensorFile`.
        flag: the flag that gives ``entry``, for messages.

    Raises:
        CheckpointError: the file cannot be read, or ``entry`` is given for a file of safetensors.
    """
    if path.suffix != SAFETENSORS:
        yield PlainTensors(TensorFile(path, entry, flag), path)
        return
    if entry is not None:
        raise CheckpointError(
            f"`{flag} {entry}` is for a file of torch.save, but {path} is a file of safetensors; "
            "leave it out."
        )
    with TensorFolder(path.parent, path.name.removesuffix(SAFETENSORS)) as tensors:
        yield PlainTensors(tensors, path)


class StoredTensors(Protocol):
    """Tensors as a folder or file holds them, under the names that it gives them."""

    @property
    def names(self) -> set[str]: ...

    def dtype(self, name: str) -> str: ...

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def tensor(self, name: str) -> Tensor: ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """Return texts beside the tensors, such as safetensors' headers have."""
        ...


class PlainTensors:
    """The tensors of a folder or file, under the network's own names and without 8-bit scales.

    ``place`` is the folder or file, for messages. Files are mapped into memory, so that a tensor
    takes memory only while it is copied. ``bytes_read`` counts the bytes that `copy` has read.
    """

    def __init__(self, source: StoredTensors, place: Path) -> None:
        self.folder = place
        self.bytes_read = 0
        self._source = source
        stored = {_WRAPPERS.sub("", name): name for name in source.names}
        # Wrappers may be nested, such as a trainer's around Self-Forcing's.
        for prefix in (*_PREFIXES, *_PREFIXES):
            own = {name: full for name, full in stored.items() if name.startswith(prefix)}
            others = [name for name in stored if name not in own and not name.startswith(_BESIDE)]
            if own and (prefix == _IN_PIPELINE or set(others) <= {_MARK}):
                stored = {name.removeprefix(prefix): full for name, full in own.items()}
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
        self._check_scales(stored)

    def _check_scales(self, stored: Mapping[str, str]) -> None:
        """Raise a CheckpointError for quantized weights that a scale alone does not give back.

        ``stored`` has the full name of each tensor by its name without prefixes.
        """
        for name, layer in self._described(stored).items():
            kind: Any = repr(layer)[:50]
            rotated = False
            if isinstance(layer, Mapping) and "format" in layer:
                kind = layer["format"]
                rotated = bool(layer.get("convrot"))
            if kind not in _EIGHT_BITS or rotated:
                raise CheckpointError(
                    f"{self.folder} holds `{name}`, so that ComfyUI has quantized the weight as "
                    f"{kind}{' after a rotation' if rotated else ''}; give the model before it was "
                    "quantized."
                )
        lost = sorted(self._scales[name] for name in self._scales.keys() - self._stored.keys())
        if lost:
            raise CheckpointError(
                f"{self.folder} holds `{lost[0]}`, but no weight that it scales; copy the whole "
                "model again."
            )

    def _described(self, stored: Mapping[str, str]) -> dict[str, Any]:
        """Return ComfyUI's descriptions of quantized weights, by the names that they have.

        They are tensors beside the weights, or lie in the headers of the files.
        """
        found = dict[str, Any]()
        for name, full in stored.items():
            if name.endswith(_DESCRIBED):
                raw = bytes(self._source.tensor(full).flatten().to(torch.uint8).tolist())
                found[name] = raw[:50]
                with suppress(UnreadableFile):
                    found[name] = parse_json(raw, self.folder)
        text = self._source.metadata.get(_IN_HEADER)
        if text is not None:
            header: Any = None
            with suppress(UnreadableFile):
                header = parse_json(text, self.folder)
            layers = header.get("layers") if isinstance(header, dict) else None
            if not isinstance(layers, dict):
                layers = {"": text}
            found |= {f"{_IN_HEADER}: {name}": layer for name, layer in layers.items()}
        return found

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

    def copy(
        self, name: str, shape: tuple[int, ...], index: tuple[slice, ...], target: Tensor
    ) -> None:
        """Copy a slice of the tensor ``name``, which must exist, to ``target``.

        Args:
            shape: the shape, such as that of a matrix, as which the tensor's values are seen.
            index: the slice of the tensor in this shape.
            target: gets the values; those with a scale are multiplied by it first, which is one
                number, or one for each row. Another scale raises CheckpointError.
        """
        values = self._source.tensor(self._stored[name]).reshape(shape)[index]
        self.bytes_read += values.numel() * values.element_size()
        if name not in self._scales and values.dtype not in _EIGHT_BITS.values():
            target.copy_(values)
            return
        scale = self._scale(name, shape[0])[index[0] if name in self._scales else slice(None)]
        for start in range(0, len(values), _ROWS_AT_A_TIME):
            some = slice(start, start + _ROWS_AT_A_TIME)
            own = scale[some] if len(scale) > 1 else scale
            target[some] = values[some].float() * own.reshape(-1, *[1] * (values.dim() - 1))

    def _scale(self, name: str, rows: int) -> Tensor:
        """Return the scale of an 8-bit tensor for each of its ``rows``, or one 1 without scales."""
        if name not in self._scales:
            return torch.ones(1)
        scale = self._source.tensor(self._scales[name]).float()
        if scale.numel() not in (1, rows):
            raise CheckpointError(
                f"{self.folder} holds `{self._scales[name]}` with shape {list(scale.shape)}, which "
                "must be one number or one for each output; use the model before it was quantized."
            )
        return scale.flatten().expand(rows)


def _torch_name(kind: str) -> str:
    return str(_EIGHT_BITS[kind]).removeprefix("torch.") if kind in _EIGHT_BITS else kind


class TensorFile:
    """The tensors of a file of torch.save, mapped into memory.

    ``entry`` is the key under which the file holds the tensors, such as ``"generator_ema"``. None
    takes the whole file if it is a dictionary of tensors, else the only key that holds one.

    Tencent's 8-bit weights lie in a file ``<stem>_fp8.pt``, and their scales, by the names of the
    layers, in ``<stem>_fp8_map.pt`` beside it.

    Raises:
        CheckpointError: the file cannot be read, ``entry`` holds no tensors, or ``entry`` is None
            and no key or several keys hold tensors; or the file has no weights, or no scales.
    """

    def __init__(self, path: Path, entry: str | None, flag: str) -> None:
        self._tensors = _chosen(path, entry, flag)
        if not any(tensor.numel() for tensor in self._tensors.values()):
            raise CheckpointError(
                f"{path} holds tensors without values, as DeepSpeed's ZeRO-3 leaves them; give the "
                "file that its `zero_to_fp32.py` writes."
            )
        if path.stem.endswith("_fp8"):
            self._tensors = {**self._tensors, **_scales_beside(path, self._tensors, flag)}

    metadata: Mapping[str, str] = MappingProxyType({})

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def dtype(self, name: str) -> str:
        return str(self._tensors[name].dtype).removeprefix("torch.")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


class PickledFolder(TensorFile):
    """The tensors of ``<stem>.bin`` in a folder, or of the files that its index lists.

    Raises:
        CheckpointError: a file cannot be read, or does not hold what the index says.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        listed = file_of_each(folder, stem, PICKLED)
        files = sorted(set(listed.values())) or [f"{stem}{PICKLED}"]
        held = {name: _chosen(folder / name, None, "--entry") for name in files}
        lost = next((name for name, file in listed.items() if name not in held[file]), None)
        if lost is not None:
            raise CheckpointError(
                f"{folder / listed[lost]} does not hold `{lost}`, which "
                f"{index_path(folder, stem, PICKLED).name} says; copy the whole model again."
            )
        self._tensors = {k: v for tensors in held.values() for k, v in tensors.items()}


@contextmanager
def open_folder(folder: Path, stem: str) -> Iterator[PlainTensors]:
    """Open the weights in a folder, and yield their tensors.

    They are files of safetensors or, if there are none, of torch.save.

    Args:
        stem: beginning of the names of the files. Of a variant alone, such as ``<stem>.fp16``, the
            files are taken, too.

    Raises:
        CheckpointError: the files cannot be read, or are those of several variants.
    """
    own = stem_of(folder, stem, SAFETENSORS)
    pickled = None if own is not None else stem_of(folder, stem, PICKLED)
    if pickled is not None:
        yield PlainTensors(PickledFolder(folder, pickled), folder)
        return
    with TensorFolder(folder, own or stem) as tensors:
        yield PlainTensors(tensors, folder)


def stem_of(folder: Path, stem: str, suffix: str) -> str | None:
    """Return the beginning of the names of a folder's files of weights that end with ``suffix``.

    It is ``stem``, or has a variant's name at its end, such as ``<stem>.fp16``, if the folder holds
    one variant alone. None is returned if there are no such files.

    Raises:
        CheckpointError: the folder has several variants.
    """
    if (folder / f"{stem}{suffix}").is_file() or (folder / index_of(stem, suffix)).is_file():
        return stem
    index = re.compile(rf"{re.escape(stem)}{re.escape(suffix)}\.index\.(\w+)\.json")
    own = re.compile(rf"{re.escape(stem)}\.(\w+){re.escape(suffix)}(?:\.index\.json)?")
    names = sorted(path.name for path in folder.iterdir())
    matches = [own.fullmatch(name) or index.fullmatch(name) for name in names]
    variants = sorted({match[1] for match in matches if match is not None})
    if len(variants) > 1:
        raise CheckpointError(
            f"{folder} holds several variants of the weights ({', '.join(variants)}); give a file "
            "of one of them, or a folder with one alone."
        )
    return f"{stem}.{variants[0]}" if variants else None


def _scales_beside(path: Path, tensors: Mapping[str, Tensor], flag: str) -> dict[str, Tensor]:
    """Return the scales, as ComfyUI names them, of the 8-bit weights in Tencent's file ``path``.

    CheckpointError is raised if the file of the scales is missing, or lacks one.
    """
    if any(name.endswith(_SCALES) for name in tensors):
        return {}
    small = [name for name, values in tensors.items() if values.dtype in _EIGHT_BITS.values()]
    place = path.with_name(f"{path.stem}_map{path.suffix}")
    if small and not place.is_file():
        raise CheckpointError(
            f"{path} holds weights in 8 bits, whose scales are in a file {place.name}, but it is "
            "not there; copy it to the same folder."
        )
    scales = _chosen(place, None, flag) if small else {}
    layers = [name.removesuffix(".weight") for name in small]
    for layer in layers:
        if layer not in scales:
            raise CheckpointError(
                f"{place} holds no scale of `{layer}`, whose weight has 8 bits in {path}; copy "
                "both files again."
            )
    return {f"{layer}{_SCALES[0]}": scales[layer] for layer in layers}


def _chosen(path: Path, entry: str | None, flag: str) -> Mapping[str, Tensor]:
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
            f"{path} holds no weights under `{flag} {entry}`; those that hold any: {shown}."
        )
    raise CheckpointError(
        f"{path} must hold weights, or one entry with weights, but those that do are: {shown}; "
        f"choose by `{flag}`, or give another file."
    )


def _holds_tensors(value: object) -> TypeGuard[Mapping[str, Tensor]]:
    return isinstance(value, Mapping) and bool(value) and all(map(torch.is_tensor, value.values()))
