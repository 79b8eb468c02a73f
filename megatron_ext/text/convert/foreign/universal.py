"""Reads universal checkpoints of DeepSpeed, which ds_to_universal.py writes.

``zero/NAME/fp32.pt`` holds each tensor of the whole model in float32, whatever the layout, and
``mp_rank_00_model_states.pt`` the flags. Rows that padded the vocabulary are left out there.
Source: the DeepSpeed paper on universal checkpointing, arXiv:2406.18820.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.foreign import names
from megatron_ext.text.convert.foreign.rank_files import read_file
from megatron_ext.text.convert.foreign.source import Key, Source, Stored, arguments_of, key_of

_TENSORS = "zero"
_VALUES = "fp32.pt"


def is_universal(folder: Path) -> bool:
    """Return whether a folder is a universal checkpoint."""
    return (folder / _TENSORS).is_dir()


def open_universal(folder: Path) -> Source:
    """Open a universal checkpoint; raise a CheckpointError if it is damaged or of another model."""
    states = sorted(folder.glob("mp_rank_*_model_states.pt"))
    if not states:
        raise CheckpointError(
            f"{folder} holds no mp_rank_00_model_states.pt, which has the flags; copy the whole "
            "checkpoint."
        )
    content = read_file(states[0])
    arguments = arguments_of(content, states[0])
    files = {path.parent.name: path for path in (folder / _TENSORS).glob(f"*/{_VALUES}")}
    empty = [x for x in (folder / _TENSORS).iterdir() if x.is_dir() and x.name not in files]
    if not files or empty:
        place = empty[0] if empty else folder / _TENSORS
        raise CheckpointError(f"{place} holds no {_VALUES}; copy the whole checkpoint.")
    names.check_names(list(files), folder)
    translated = names.pipeline_names(files)
    tensors: dict[Key, Stored] = {}
    for name, path in files.items():
        ours = translated.get(name) or names.core_name(name)
        tensors[key_of(ours)] = Stored(name, [partial(_values, path)], is_joined=True)
    embedding = tensors.get("embedding.word_embeddings.weight")
    if embedding is None:
        raise CheckpointError(
            f"{folder} holds no embedding of a GPT; give a checkpoint of Megatron-DeepSpeed."
        )
    rows = embedding.parts[0]()
    return Source(
        path=folder,
        arguments=arguments,
        iteration=content.get("iteration"),
        tensors=tensors,
        vocabulary=rows.shape[0],
        dtype=rows.dtype,
        unused={"exp_avg, exp_avg_sq": "state of the optimizer: only the weights are imported"},
    )


def _values(path: Path) -> Tensor:
    values = read_file(path).get("param")
    if not isinstance(values, Tensor):
        raise CheckpointError(f"{path} holds no tensor `param`; copy the checkpoint again.")
    return values
