"""Reads and writes folders of safetensors files in the form of transformers' ``from_pretrained``.

Tensors are read one at a time, and written one file at a time. A CheckpointError is raised for a
file that cannot be read, and for a folder that would be overwritten.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from megatron_ext import limits
from megatron_ext.checkpoint.files import is_plain_name, make_durable, sync_folder
from megatron_ext.disk.reading import UnreadableFile, read_json
from megatron_ext.disk.writing import cleared, open_new, write_text
from megatron_ext.errors import CheckpointError, FlagError

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""safetensors' name of a dtype of plain weights -> torch's name."""
_WRITTEN = {**DTYPES, "F8_E4M3": "float8_e4m3fn", "U8": "uint8"}
"""safetensors' name of each dtype that can be written -> torch's name."""


def _safetensors() -> Any:
    """Import and return the optional package safetensors."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError(
            "Folders of Hugging Face's models need the package safetensors, which is not "
            "installed; run `pip install safetensors`."
        ) from error
    return safetensors


SAFETENSORS = ".safetensors"


def index_of(stem: str, suffix: str = SAFETENSORS) -> str:
    """Return the name of the index file, which maps each tensor's name to the file that holds it.

    ``stem`` is the beginning of the names of index and tensor files, such as "model", and
    ``suffix`` the ending of the names of tensor files.
    """
    return f"{stem}{suffix}.index.json"


def index_path(folder: Path, stem: str, suffix: str = SAFETENSORS) -> Path:
    """Return the path of the index file in a folder, which may lack one.

    If ``stem`` has a variant, such as "model.fp16", the index may be ``model<suffix>.index`` with
    ``.fp16.json``, as diffusers writes it.
    """
    usual = folder / index_of(stem, suffix)
    name, _, variant = stem.rpartition(".")
    of_variant = folder / f"{name}{suffix}.index.{variant}.json"
    return of_variant if name and not usual.is_file() and of_variant.is_file() else usual


class TensorFolder:
    """The tensors of ``<stem>.safetensors`` in a folder, or of the files that its index lists.

    Files are mapped into memory, so that a tensor takes memory only while it is used.
    ``bytes_read`` counts the bytes of all requested blocks and tensors.
    """

    def __init__(self, folder: Path, stem: str = "model") -> None:
        self.folder = folder
        self.bytes_read = 0
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of = file_of_each(folder, stem)
        self._stored_as: dict[str, str] = {}
        try:
            self._open(stem)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def _open(self, stem: str) -> None:
        library = _safetensors()
        for name in sorted(set(self._file_of.values())) or [f"{stem}.safetensors"]:
            path = self.folder / name
            try:
                opened = library.safe_open(path, framework="pt")
                self._files[name] = self._stack.enter_context(opened)
            except (OSError, library.SafetensorError) as error:
                raise CheckpointError(
                    f"{path} cannot be read ({error}); copy the whole model again."
                ) from error
        stored = {name: file for file in self._files for name in self._files[file].keys()}  # noqa: SIM118
        self._file_of = self._file_of or stored
        missing = sorted(name for name, file in self._file_of.items() if stored.get(name) != file)
        if missing:
            raise CheckpointError(
                f"{self.folder / self._file_of[missing[0]]} does not hold `{missing[0]}`, which "
                f"{index_of(stem)} says; copy the whole model again."
            )

    def rename(self, stored_as: Mapping[str, str]) -> None:
        """Give tensors other names than the files do: new name -> name in the files."""
        file_of = {new: self._file_of[old] for new, old in stored_as.items()}
        others = self._file_of.keys() - stored_as.values()
        self._file_of = {name: self._file_of[name] for name in others} | file_of
        self._stored_as = dict(stored_as)

    @property
    def names(self) -> set[str]:
        return self.stored_names

    @property
    def stored_names(self) -> set[str]:
        """Return the names of the tensors in the files, whatever they stand for."""
        return set(self._file_of)

    @property
    def metadata(self) -> dict[str, str]:
        """Return the texts that the headers of the files hold beside names and shapes."""
        return {k: v for file in self._files.values() for k, v in (file.metadata() or {}).items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.shape(name) for name in self._file_of}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return torch's name of a tensor's dtype; safetensors' name if it is not in `DTYPES`."""
        kind = self._slice(name).get_dtype()
        return str(DTYPES.get(kind, kind))

    def tensor(self, name: str) -> Tensor:
        return self._counted(self._file(name).get_tensor(self._stored_as.get(name, name)))

    def block(self, name: str, index: tuple[int | slice, ...]) -> Tensor:
        """Return ``tensor[index]`` as a view of its file, so that only the used part is read."""
        return self._counted(self._slice(name)[index])

    def _counted(self, values: Tensor) -> Tensor:
        self.bytes_read += values.numel() * values.element_size()
        return values

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(self._stored_as.get(name, name))

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder} holds no `{name}`, which its config.json implies; copy the whole "
                "model again."
            )
        return self._files[self._file_of[name]]


def file_of_each(folder: Path, stem: str, suffix: str = SAFETENSORS) -> dict[str, str]:
    """Read the index of a folder, and map each tensor's name to the name of the file that holds it.

    Return {} if there is no index, because a single file holds all tensors.
    """
    path = index_path(folder, stem, suffix)
    single = f"{stem}{suffix}"
    if path.is_file():
        try:
            files = read_json(path, not_finite=True)["weight_map"]
            for file in files.values():
                if not is_plain_name(file):
                    raise ValueError(f"it names {file}, which does not lie in this folder")
            return {str(name): str(file) for name, file in files.items()}
        except UnreadableFile as error:
            raise CheckpointError(f"{path} is damaged ({error.reason}); copy it again.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error!r}); copy it again.") from error
    if not (folder / single).is_file():
        part = next((x.name for x in sorted(folder.glob(f"{stem}-*-of-*{suffix}"))), None)
        raise CheckpointError(
            f"{folder} holds neither {single} nor {path.name}; save the model with safetensors."
            if part is None
            else f"{folder} holds {part}, but not {path.name}, which says what each file holds; "
            "copy that file too."
        )
    return {}


def check_dtype(place: Path, name: str, kind: str, dtype: str) -> None:
    """Raise a CheckpointError unless the dtype of a tensor is float32, bfloat16 or float16.

    A model with other dtypes is quantized, and cannot be read.

    Args:
        place: the file or folder, for the message.
        name: name of the tensor, for the message.
        kind: the dtype as the file calls it, for the message.
        dtype: the dtype to check, by its name in torch.
    """
    if dtype not in DTYPES.values():
        raise CheckpointError(
            f"{place} holds `{name}` as {kind}, which is no float32, bfloat16 or float16; use the "
            "model before it was quantized."
        )


def only_dtype(place: Path, dtypes: Iterable[str]) -> str:
    """Return the one dtype of all tensors, such as ``"bfloat16"``; raise an error if two differ.

    ``place`` is the file or folder of the tensors, for the message.
    """
    kinds = sorted(set(dtypes))
    if len(kinds) != 1:
        raise CheckpointError(
            f"{place} holds tensors in {' and '.join(kinds) or 'no dtype'}, but a checkpoint has "
            "one dtype; give it as `--dtype`."
        )
    return kinds[0]


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]


def write_others(folder: Path, config: Mapping[str, Any], copied: Sequence[Path]) -> None:
    """Write config.json and copies of other files to a folder of weights."""
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    write_text(folder / "config.json", text)
    for path in copied:
        shutil.copyfile(path, cleared(folder / path.name))


def check_target(target: Path) -> None:
    """Raise a CheckpointError if the target is not a new or empty folder, or a new file."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"`--hf` ({target}) holds something already; give a new folder.")


@contextmanager
def written_aside(target: Path, flag: str = "--hf", *, is_file: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to write to, which replaces the folder ``target`` on success.

    If writing fails, the temporary folder is removed, and an existing target stays as it was.

    Args:
        flag: the flag that gave the target, for the error if it cannot be written.
        is_file: whether the target is a file; the file of this name in the temporary folder then
            becomes the target.
    """
    folder = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        try:
            yield folder
            for path in folder.iterdir():
                make_durable(path)
            sync_folder(folder)
            if target.is_dir():
                shutil.rmtree(target)
            (folder / target.name if is_file else folder).rename(target)
            sync_folder(target.parent)
        finally:
            if folder.exists():
                shutil.rmtree(folder)
    except (OSError, _safetensors().SafetensorError) as error:
        raise CheckpointError(
            f"`{flag}` ({target}) cannot be written ({limits.cause(error, target)}); mend this or "
            "give another folder."
        ) from error


MADE_BY_TORCH = {"format": "pt"}
"""The metadata to write into a safetensors file; transformers refuses a file without it."""


def size_errors(flag: str, size: str) -> list[FlagError]:
    """Return an error, in a list, unless ``size`` is a size of files; ``flag`` gave it."""
    if re.fullmatch(r"[1-9]\d{0,8}(KB|MB|GB|TB)", size, re.IGNORECASE):
        return []
    return [FlagError(flag, size, "must be a number of KB, MB, GB or TB", "give a size like 5GB")]


def plan_files(
    folder: Path | None,
    described: dict[str, Tensor],
    max_shard_size: int | str,
    stem: str,
    *,
    parameters: int | None = None,
) -> dict[str, list[str]]:
    """Divide the tensors of a folder among files, and write the index.

    Return the names of the tensors in each file.

    Args:
        folder: where to write the index if there are several files; None writes nothing.
        described: all tensors by name, on the meta device.
        max_shard_size: size limit of each file, in bytes or as text such as ``"5GB"``.
        stem: beginning of the files' names.
        parameters: number of the model's parameters, which transformers writes into the index;
            None leaves it out, as diffusers does.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    plan = split_torch_state_dict_into_shards(
        described, max_shard_size=max_shard_size, filename_pattern=f"{stem}{{suffix}}.safetensors"
    )
    if plan.is_sharded and folder is not None:
        counted = {} if parameters is None else {"total_parameters": parameters}
        index = {
            "metadata": {**counted, **plan.metadata},
            "weight_map": plan.tensor_to_filename,
        }
        write_text(folder / index_of(stem), json.dumps(index, indent=2, sort_keys=True) + "\n")
    return dict(plan.filename_to_tensors)


def write_tensors(path: Path, described: Mapping[str, Tensor], values: Iterable[Tensor]) -> None:
    """Write a safetensors file tensor by tensor, so that only one at a time is in memory.

    safetensors' own `save_file` needs all tensors of a file at once. The format is the length of a
    JSON header as a little-endian 64-bit integer, the header, and the values.

    Args:
        described: all tensors on the meta device, in the order of ``values``.
    """
    kinds = {name: kind for kind, name in _WRITTEN.items()}
    header: dict[str, Any] = {"__metadata__": MADE_BY_TORCH}
    end = 0
    for name, tensor in described.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind = kinds[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open_new(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        iterator = iter(values)
        for _ in described:
            # No name holds the tensor while the next one is made.
            file.write(_bytes_of(next(iterator)))


def _bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return data
