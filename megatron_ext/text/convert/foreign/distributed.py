"""Reads checkpoints of megatron-core (``torch_dist``) that Megatron-LM wrote.

Their tensors have the names and forms of this project's checkpoints, which lack only the flags.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.files import root_of
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.stored import RUN_CONFIG
from megatron_ext.checkpoint.unpickling import common_state_of, stored_entries
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.convert.foreign.source import Source, arguments_of

_EMBEDDING = "embedding.word_embeddings.weight"


def is_distributed(folder: Path) -> bool:
    """Return whether a folder is such a checkpoint, and not one of this project."""
    return (folder / "metadata.json").is_file() and not (folder / RUN_CONFIG).exists()


def open_distributed(folder: Path) -> Source:
    """Open a checkpoint, of which `load_distributed` loads the weights.

    Raises:
        CheckpointError: it is damaged, or holds no GPT.
    """
    common = common_state_of(folder)
    embedding = stored_entries(folder).get(_EMBEDDING)
    if not isinstance(embedding, TensorStorageMetadata):
        raise CheckpointError(
            f"{folder} holds no embedding of a GPT; give a checkpoint of pretrain_gpt.py."
        )
    return Source(
        path=folder,
        arguments=arguments_of(common, folder),
        iteration=common.get("iteration"),
        tensors={},
        vocabulary=embedding.size[0],
        dtype=embedding.properties.dtype,
    )


def load_distributed(folder: Path, chunk: Any, context: ParallelContext) -> None:
    """Fill a whole model with the weights of a checkpoint.

    Raises:
        CheckpointError: the weights are not those of the model.
    """
    root, iteration = root_of(folder)
    if iteration is None:
        raise CheckpointError(
            f"{folder} must be named as an iteration, such as iter_0000100; rename it."
        )
    config = CheckpointConfig(load=str(root), ckpt_step=iteration, finetune=True)
    CheckpointManager(config, context).load(model=[chunk])
