"""Reads checkpoints with one file of ``torch.save`` per model-parallel rank.

Megatron-LM's format ``torch`` has ``mp_rank_TT/model_optim_rng.pt`` for tensor-parallel rank TT;
``mp_rank_TT_PPP`` and ``mp_rank_TT_PPP_EEE`` add the pipeline and the expert-parallel rank
where there are several. DeepSpeed has ``mp_rank_TT_model_states.pt``, and for a pipeline
``layer_NN-model_TT-model_states.pt`` for each of its modules.
"""

from __future__ import annotations

import re
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_ext.checkpoint.unpickling import plain_content
from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.foreign import names
from megatron_ext.text.convert.foreign.source import Key, Source, Stored, arguments_of, key_of

INERT = "megatron deepspeed apex transformers datetime numpy".split()
"""Packages whose objects may be among the flags and states of a file; none of their code is run."""
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_EMBEDDING = "embedding.word_embeddings.weight"
_WEIGHTS = re.compile(r"model(\d*)$")
_LAYER_NUMBER = re.compile(r"^(decoder\.layers\.)(\d+)(\..+)$")
_MODULE_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt$")
_STATES = "model_states.pt"
_NO_WEIGHTS = "not imported: only the weights are"
_OLDEST = 2.0
"""Oldest version of Megatron-LM's format whose queries, keys and values have today's order."""


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of one rank's file; tensors are read from it when they are used."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, which the flags of the run that saved the checkpoint imply; copy "
            "the whole checkpoint."
        )
    # torch cannot map files of its oldest format, which are no archives.
    content = plain_content(path, path, mmap=zipfile.is_zipfile(path), inert=INERT)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold names and values; give another checkpoint.")
    return content


def is_torch_format(folder: Path) -> bool:
    """Return whether a folder is a checkpoint in Megatron-LM's format ``torch``."""
    return any(path for name in _FILES for path in folder.glob(f"mp_rank_*/{name}"))


def is_deepspeed(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of DeepSpeed that has files of model states."""
    return any(folder.glob(f"mp_rank_*_{_STATES}"))


def open_torch_format(folder: Path) -> Source:
    """Open a checkpoint in Megatron-LM's format ``torch``.

    Raises:
        CheckpointError: a rank's file is missing, damaged, or of another layout than the first.
    """
    first = min(path for name in _FILES for path in folder.glob(f"mp_rank_*/{name}"))
    content = read_file(first)
    arguments = arguments_of(content, first)
    version = content.get("checkpoint_version") or 0
    if not isinstance(version, (int, float)) or version < _OLDEST:
        raise CheckpointError(
            f"{first} has `checkpoint_version` {version}, whose weights have another order than "
            f"those since {_OLDEST}; load and save it with Megatron-LM first."
        )
    grid = _Grid.of(arguments, folder, first.name)
    tensors: dict[Key, list[tuple[str, Any]]] = {}
    unused: dict[str, str] = {}
    for tensor_rank in range(grid.tensor):
        layers = _Layers()
        files: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
        for stage in range(grid.pipeline):
            for expert_rank in range(grid.expert):
                path = grid.path(tensor_rank, stage, expert_rank)
                content = read_file(path)
                if tensor_rank == stage == expert_rank == 0:
                    unused |= dict.fromkeys(_others(content), _NO_WEIGHTS)
                files[stage, expert_rank] = dict(_chunks(content, path))
        for chunk in files[0, 0]:
            for stage in range(grid.pipeline):
                offset = layers.take(files[stage, 0], chunk, grid.path(tensor_rank, stage, 0))
                for expert_rank in range(grid.expert):
                    held = files[stage, expert_rank].get(chunk, {})
                    for name, value in _in_whole_model(held, offset, expert_rank, arguments):
                        reason = _reason_to_skip(name, value)
                        if reason is not None:
                            unused[name] = reason
                            continue
                        is_expert = "experts" in name and name.endswith("]")
                        if expert_rank and not is_expert:
                            continue
                        tensors.setdefault(key_of(name), []).append((name, value))
    return _source(folder, arguments, content.get("iteration"), tensors, unused)


def open_deepspeed(folder: Path) -> Source:
    """Open a checkpoint of DeepSpeed: of one file per tensor-parallel rank, or of a pipeline.

    Raises:
        CheckpointError: a file is missing or damaged, or holds a model that is not Megatron-LM's.
    """
    ranks = sorted(folder.glob(f"mp_rank_*_{_STATES}"))
    content = read_file(ranks[0])
    arguments = arguments_of(content, ranks[0])
    modules = [path for path in sorted(folder.iterdir()) if _MODULE_FILE.match(path.name)]
    weights = _of_modules(modules, folder) if modules else [_module_of(path) for path in ranks]
    size = int(getattr(arguments, "tensor_model_parallel_size", 1))
    if len(weights) != size:
        raise CheckpointError(
            f"{folder} holds the files of {len(weights)} tensor-parallel ranks, but its flags say "
            f"`--tensor-model-parallel-size` {size}; copy the whole checkpoint."
        )
    tensors: dict[Key, list[tuple[str, Any]]] = {}
    unused = {name: _NO_WEIGHTS for name in content if name not in ("args", "module", "iteration")}
    for held in weights:
        for name, value in held.items():
            reason = _reason_to_skip(name, value)
            if reason is not None:
                unused[name] = reason
                continue
            key = key_of(names.with_expert(names.core_name(name)))
            tensors.setdefault(key, []).append((name, value))
    return _source(folder, arguments, content.get("iteration"), tensors, unused)


def _reason_to_skip(name: str, value: Any) -> str | None:
    """Return why an entry of a rank's file is no weight to import, None if it is one."""
    return names.reason_to_skip(name) or (None if isinstance(value, Tensor) else "no tensor")


def _source(
    folder: Path,
    arguments: Namespace,
    iteration: Any,
    tensors: dict[Key, list[tuple[str, Any]]],
    unused: dict[str, str],
) -> Source:
    """Return the checkpoint of weights whose parts, by key, the tensor-parallel ranks hold."""
    return Source(
        path=folder,
        arguments=arguments,
        iteration=iteration,
        tensors={key: _stored(parts) for key, parts in tensors.items()},
        vocabulary=_rows(tensors, folder),
        dtype=tensors[_EMBEDDING][0][1].dtype,
        unused=unused,
    )


def _module_of(path: Path) -> dict[str, Any]:
    module = read_file(path).get("module")
    if not isinstance(module, Mapping) or not module:
        raise CheckpointError(
            f"{path} holds no weights (`module`), as with ZeRO-3, which splits them; convert the "
            "checkpoint with DeepSpeed's ds_to_universal.py and give the new folder."
        )
    held = names.flattened(module)
    names.check_names(list(held), path)
    return held


def _of_modules(files: list[Path], folder: Path) -> list[dict[str, Any]]:
    """Return, for each tensor-parallel rank, the weights of all modules of a pipeline by name."""
    ranks: dict[int, dict[str, Any]] = {}
    for path in files:
        match = _MODULE_FILE.match(path.name)
        assert match is not None
        held = names.flattened(read_file(path))
        own = ranks.setdefault(int(match[2]), {})
        own |= {f"{int(match[1])}.{name}": value for name, value in held.items()}
    if {frozenset(held) for held in ranks.values()} != {frozenset(ranks[min(ranks)])}:
        raise CheckpointError(
            f"{folder} lacks some files layer_NN-model_TT-{_STATES} of a tensor-parallel rank; "
            "copy the whole checkpoint."
        )
    translated = names.pipeline_names(ranks[min(ranks)])
    return [
        {translated.get(name, name): value for name, value in held.items()}
        for _, held in sorted(ranks.items())
    ]


class _Grid:
    """The model-parallel ranks of a run in Megatron-LM's format ``torch``, and their files.

    Attributes:
        tensor, pipeline, expert: the numbers of ranks.
    """

    def __init__(self, sizes: tuple[int, int, int], folder: Path, file: str) -> None:
        self.tensor, self.pipeline, self.expert = sizes
        self._folder = folder
        self._file = file

    @classmethod
    def of(cls, arguments: Namespace, folder: Path, file: str) -> _Grid:
        """Return the grid of a run's flags; raise a CheckpointError if its files differ from it."""

        def size(name: str) -> int:
            value = getattr(arguments, f"{name}_parallel_size", None)
            return value if isinstance(value, int) and value > 0 else 1

        tensor = size("tensor_model") if hasattr(arguments, "tensor_model_parallel_size") else 0
        sizes = tensor or size("model"), size("pipeline_model"), size("expert_model")
        expert_tensor = getattr(arguments, "expert_tensor_parallel_size", None)
        if sizes[2] > 1 and expert_tensor not in (None, sizes[0]):
            raise CheckpointError(
                f"{folder} was saved with `--expert-tensor-parallel-size` {expert_tensor}, which "
                f"differs from the tensor-parallel size ({sizes[0]}), and files of the format "
                "`torch` do not tell these ranks apart; save it with `--ckpt-format torch_dist`."
            )
        grid = cls(sizes, folder, file)
        expected = {grid.path(*rank) for rank in _product(*sizes)}
        present = set(folder.glob(f"mp_rank_*/{file}"))
        if present - expected:
            extra = min(present - expected).parent.name
            raise CheckpointError(
                f"{folder} holds {extra}, but its flags say tensor × pipeline × expert "
                f"{' × '.join(map(str, sizes))}, in which there is no such rank; remove the files "
                "of other checkpoints."
            )
        return grid

    def path(self, tensor: int, stage: int, expert: int) -> Path:
        """Return the file of a rank."""
        name = f"mp_rank_{tensor:02d}"
        name += f"_{stage:03d}" if self.pipeline > 1 else ""
        name += f"_{expert:03d}" if self.expert > 1 else ""
        return self._folder / name / self._file


def _product(*sizes: int) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield ()
        return
    for number in range(sizes[0]):
        for rest in _product(*sizes[1:]):
            yield (number, *rest)


class _Layers:
    """Counts the decoder's layers from chunk to chunk, since files number them within a chunk."""

    def __init__(self) -> None:
        self._count = 0

    def take(self, chunks: dict[str, dict[str, Any]], chunk: str, path: Path) -> int:
        """Return the number of layers before a chunk, and count the chunk's own."""
        if chunk not in chunks:
            raise CheckpointError(
                f"{path} holds no `{chunk}`, which the files of other stages hold; copy the whole "
                "checkpoint."
            )
        offset = self._count
        matches = (_LAYER_NUMBER.match(name) for name in chunks[chunk])
        numbers = {int(match[2]) for match in matches if match}
        if numbers != set(range(len(numbers))):
            raise CheckpointError(
                f"{path} holds the layers {sorted(numbers)} of its stage, which must begin at 0 "
                "without a gap; give another checkpoint."
            )
        self._count += len(numbers)
        return offset


def _chunks(content: dict[str, Any], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of a file with a chunk's weights, with megatron-core's names."""
    entries = {name: value for name, value in content.items() if _WEIGHTS.match(name)}
    if not entries or not all(isinstance(value, Mapping) for value in entries.values()):
        raise CheckpointError(f"{path} holds no weights (`model`); give another checkpoint.")
    for entry in sorted(entries, key=lambda name: int(name.removeprefix("model") or 0)):
        held = names.flattened(entries[entry])
        names.check_names(list(held), path)
        yield entry, {names.core_name(name): value for name, value in held.items()}


def _others(content: dict[str, Any]) -> list[str]:
    known = ("args", "checkpoint_version", "iteration")
    return [name for name in content if name not in known and not _WEIGHTS.match(name)]


def _in_whole_model(
    held: Mapping[str, Any], offset: int, expert_rank: int, arguments: Namespace
) -> Iterator[tuple[str, Any]]:
    """Yield the weights of a chunk with the numbers that layers and experts have in the model.

    Args:
        offset: number of the decoder's layers before the chunk.
        expert_rank: the expert-parallel rank whose experts the chunk holds.
    """
    experts = int(getattr(arguments, "num_experts", None) or 0)
    ranks = int(getattr(arguments, "expert_model_parallel_size", None) or 1)
    local = experts // ranks
    for name, value in held.items():
        match = _LAYER_NUMBER.match(name)
        if match is not None:
            name = f"{match[1]}{int(match[2]) + offset}{match[3]}"
        if name.endswith(("mlp.experts.weight1", "mlp.experts.weight2")) and local:
            yield from _grouped(name, value, local, expert_rank * local)
        else:
            yield names.with_expert(name, expert_rank * local), value


def _grouped(name: str, value: Tensor, local: int, first: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of each expert in a tensor that joins those of a rank, stored [in, out].

    ``weight1`` ``[h, local * ffn]`` and ``weight2`` ``[local * ffn, h]`` are the first and second
    layers of ``local`` experts, of which the first has the index ``first``.
    """
    is_first = name.endswith("weight1")
    hidden = value.shape[0 if is_first else 1]
    parts = value.view(local, hidden, -1) if is_first else value.view(local, -1, hidden)
    stem = name.rpartition(".")[0]
    for number in range(local):
        layer = f"{stem}.linear_fc{1 if is_first else 2}.weight{number}"
        yield names.with_expert(layer, first), parts[number].t()


def _stored(parts: list[tuple[str, Tensor]]) -> Stored:
    return Stored(parts[0][0], [partial(_itself, value) for _, value in parts])


def _itself(value: Tensor) -> Tensor:
    return value


def _rows(tensors: Mapping[Key, list[tuple[str, Tensor]]], folder: Path) -> int:
    parts = tensors.get(_EMBEDDING)
    if parts is None:
        raise CheckpointError(
            f"{folder} holds no embedding of a GPT; give a checkpoint of pretrain_gpt.py."
        )
    return sum(value.shape[0] for _, value in parts)
