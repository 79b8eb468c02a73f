"""Tensors of a folder of safetensors files, one at a time."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ext.checkpoint.manifest import is_plain_name
from megatron_ext.errors import CheckpointError

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names of safetensors, and torch's."""


class TensorSource(Protocol):
    """Tensors by name, which are read when they are asked for.

    Attributes:
        folder: where they lie, for messages.
    """

    folder: Path

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""

    def dtypes(self) -> dict[str, str]:
        """Names of tensors to names of torch's dtypes."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names of tensors to their shapes."""

    def tensor(self, name: str) -> Tensor:
        """One tensor."""


def index_of(stem: str) -> str:
    """The file that says which file holds which tensor."""
    return f"{stem}.safetensors.index.json"


class TensorFolder:
    """The tensors of ``model.safetensors``, or of the files that its index lists.

    Files are mapped into memory, so that a tensor takes memory only while it is used.

    Args:
        folder: with the files.
        stem: what their names begin with.

    Raises:
        CheckpointError: no such file, a damaged one, or an index that names what is not there.
    """

    def __init__(self, folder: Path, stem: str = "model") -> None:
        self.folder = folder
        self._index = index_of(stem)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of = _file_of_each(folder, stem)
        try:
            for name in sorted(set(self._file_of.values())) or [f"{stem}.safetensors"]:
                self._files[name] = self._open(name)
            self._check_index()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _open(self, name: str) -> Any:
        path = self.folder / name
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); copy the whole model again."
            ) from error

    def _check_index(self) -> None:
        held = {name: file for file in self._files for name in self._files[file].keys()}  # noqa: SIM118
        self._file_of = self._file_of or held
        missing = sorted(name for name, file in self._file_of.items() if held.get(name) != file)
        if missing:
            raise CheckpointError(
                f"{self.folder / self._file_of[missing[0]]} does not hold `{missing[0]}`, which "
                f"{self._index} says; copy the whole model again."
            )

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def dtypes(self) -> dict[str, str]:
        """Names of tensors to names of torch's dtypes, read without the tensors."""
        found = {}
        for name, file in self._file_of.items():
            kind = self._files[file].get_slice(name).get_dtype()
            if kind not in DTYPES:
                raise CheckpointError(
                    f"{self.folder / file} holds `{name}` as {kind}, which is no float32, bfloat16 "
                    "or float16; use the model before it was quantized."
                )
            found[name] = DTYPES[kind]
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names of tensors to their shapes, read without the tensors."""
        slices = {name: self._files[file].get_slice(name) for name, file in self._file_of.items()}
        return {name: tuple(part.get_shape()) for name, part in slices.items()}

    def tensor(self, name: str) -> Tensor:
        """One tensor.

        Raises:
            CheckpointError: there is none of that name.
        """
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder} holds no `{name}`, which its config.json implies; copy the whole "
                "model again."
            )
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor


def _file_of_each(folder: Path, stem: str) -> dict[str, str]:
    """The index, or nothing where one file holds all.

    Raises:
        CheckpointError: neither, or an index that cannot be read.
    """
    path, single = folder / index_of(stem), f"{stem}.safetensors"
    if path.is_file():
        try:
            files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            for file in files.values():
                if not is_plain_name(file):
                    raise ValueError(f"it names {file}, which does not lie in this folder")
            return {str(name): str(file) for name, file in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r}); copy it again.") from error
    if not (folder / single).is_file():
        raise CheckpointError(
            f"{folder} holds neither {single} nor {path.name}; save the model with safetensors."
        )
    return {}


def torch_dtype(name: str) -> torch.dtype:
    """``float32``, ``bfloat16`` or ``float16`` as torch's dtype."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype
