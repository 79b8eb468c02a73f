"""Writes a folder that ``from_pretrained`` of transformers loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from megatron_ext.checkpoint.huggingface.names import VOCABULARY, RowShape, to_hf
from megatron_ext.checkpoint.huggingface.read import index_of
from megatron_ext.checkpoint.manifest import make_durable
from megatron_ext.checkpoint.paths import sync_folder
from megatron_ext.errors import CheckpointError

COMPANIONS = (
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "generation_config.json",
)
"""Files beside the weights that belong to the tokenizer or to generation."""


class Writable(Protocol):
    """Tensors to write.

    Attributes:
        described: all of them, on the meta device.
    """

    described: dict[str, Tensor]

    def some(self, names: list[str]) -> dict[str, Tensor]:
        """Some tensors, each in memory of its own, as safetensors wants them."""


class Exported:
    """Our parameters as tensors of transformers, made when they are asked for.

    Args:
        parameters: full, by our names.
        shape: of the attention.
        vocab_size: rows of the vocabulary without padding.
        dtype: of the tensors to give.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        shape: RowShape,
        *,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._parameters = parameters
        self._shape = shape
        self._vocab_size = vocab_size
        self._dtype = dtype
        self._owner: dict[str, str] = {}
        self.described: dict[str, Tensor] = {}
        for ours, parameter in parameters.items():
            for theirs, tensor in self._of(ours, parameter.detach().to("meta")).items():
                self._owner[theirs] = ours
                self.described[theirs] = tensor

    def _of(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        parts = to_hf(name, parameter, self._shape)
        return {
            theirs: (part[: self._vocab_size] if theirs in VOCABULARY else part).to(self._dtype)
            for theirs, part in parts.items()
        }

    def some(self, names: list[str]) -> dict[str, Tensor]:
        """Some tensors, each in memory of its own, as safetensors wants them."""
        found: dict[str, Tensor] = {}
        for ours in dict.fromkeys(self._owner[name] for name in names):
            parts = self._of(ours, self._parameters[ours].detach())
            found.update({n: p.clone().contiguous() for n, p in parts.items() if n in names})
        return found


def write_folder(
    target: Path,
    tensors: Writable,
    config: Mapping[str, Any],
    *,
    like: Path | None,
    max_shard_size: int | str,
    stem: str = "model",
) -> None:
    """Write weights, config.json and the files of the tokenizer; all of it, or nothing.

    Args:
        target: a folder that does not exist yet, or is empty.
        tensors: what to write, a file at a time.
        config: content of config.json.
        like: folder whose tokenizer files are copied.
        max_shard_size: of one file, in bytes or such as ``"5GB"``.
        stem: what the names of the files with tensors begin with.

    Raises:
        CheckpointError: the folder holds something, or cannot be written.
    """
    with _aside(target) as folder:
        _write_weights(folder, tensors, max_shard_size, stem)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        for path in companions(like) if like is not None else []:
            shutil.copyfile(path, folder / path.name)
        for path in folder.iterdir():
            make_durable(path)


def check_target(target: Path) -> None:
    """Refuse to write over anything.

    Raises:
        CheckpointError: the target is a file, or a folder that holds something.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"`--hf` ({target}) holds something already; give a new folder.")


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A folder beside the target that takes its name when all went well."""
    check_target(target)
    folder = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        try:
            yield folder
            sync_folder(folder)
            if target.is_dir():
                target.rmdir()
            folder.rename(target)
            sync_folder(target.parent)
        finally:
            if folder.exists():
                shutil.rmtree(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"`--hf` ({target}) cannot be written ({error}); free some space or give another "
            "folder."
        ) from error


def _write_weights(folder: Path, tensors: Writable, max_shard_size: int | str, stem: str) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    plan = split_torch_state_dict_into_shards(
        tensors.described,
        max_shard_size=max_shard_size,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
    )
    files = plan.filename_to_tensors.items()
    for file, names in tqdm(files, "Exporting", unit="file", delay=1.0, leave=False, disable=None):
        # transformers refuses files that do not say which framework wrote them.
        save_file(tensors.some(list(names)), folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / index_of(stem)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def companions(folder: Path) -> list[Path]:
    """Files of the tokenizer and of generation in a folder, sorted."""
    return sorted({path for form in COMPANIONS for path in folder.glob(form) if path.is_file()})
