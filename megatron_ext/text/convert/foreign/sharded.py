"""Reads checkpoints of torch.distributed.checkpoint that Megatron-LM wrote.

They are in its formats ``fsdp_dtensor`` (Megatron-FSDP) and ``torch_dcp`` (torch's FSDP2). Each
tensor is whole in them, whatever the layout. ``fsdp_dtensor`` stores the first layer of a gated MLP
as two tensors, whose names end with ``_w`` (the gate) and ``_v``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.unpickling import index_kept, read_object, read_tensors, stored_entries
from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.foreign import names
from megatron_ext.text.convert.foreign.source import Key, Source, Stored, arguments_of, key_of

_MODEL = "model."
_HALVES = ("_w", "_v")


def is_sharded(folder: Path) -> bool:
    """Return whether a folder is such a checkpoint.

    Checkpoints of megatron-core (``torch_dist``) also have a file ``metadata.json``.
    """
    return (folder / ".metadata").is_file() and not (folder / "metadata.json").exists()


def open_sharded(folder: Path) -> Source:
    """Open a checkpoint in the format ``fsdp_dtensor`` or ``torch_dcp``.

    Raises:
        CheckpointError: it is damaged, or holds no GPT of Megatron-LM.
    """
    entries = stored_entries(folder)
    named: dict[str, Any] = {
        name: read_object(folder, name) for name in ("args", "iteration") if name in entries
    }
    arguments = arguments_of(named, folder)
    weights = {name: entry for name, entry in entries.items() if name.startswith(_MODEL)}
    names.check_names([name.removeprefix(_MODEL) for name in weights], folder)
    unused = {
        name.split(".")[0]: "not imported: only the weights are"
        for name in entries.keys() - weights.keys() - named.keys()
    }
    tensors: dict[Key, Stored] = {}
    for name, entry in weights.items():
        reason = names.reason_to_skip(name)
        if reason is not None or not isinstance(entry, TensorStorageMetadata):
            unused[name] = reason or "no tensor"
            continue
        stem = name[:-2] if name.endswith(_HALVES) else name
        read = [f"{stem}{half}" for half in _HALVES] if stem != name else [name]
        lacking = [each for each in read if each not in weights]
        if lacking:
            raise CheckpointError(
                f"{folder} holds `{name}`, but not `{lacking[0]}`, the other half of a gated MLP's "
                "first layer; copy the whole checkpoint."
            )
        key = key_of(names.with_expert(names.core_name(stem)))
        parts = [partial(_tensor, folder, each) for each in read]
        tensors[key] = Stored(stem, parts, is_joined=True)
    embedding = next((x for x in weights if x.endswith("embedding.word_embeddings.weight")), None)
    if embedding is None:
        raise CheckpointError(
            f"{folder} holds no embedding of a GPT; give a checkpoint of pretrain_gpt.py."
        )
    return Source(
        path=folder,
        arguments=arguments,
        iteration=named.get("iteration"),
        tensors=tensors,
        vocabulary=weights[embedding].size[0],
        dtype=weights[embedding].properties.dtype,
        unused=unused,
        opened=index_kept(folder),
    )


def _tensor(folder: Path, name: str) -> Tensor:
    return read_tensors(folder, [name])[name]
