"""A Hugging Face model as a checkpoint of ours.

One copy of the weights is in memory, and one parameter's tensors beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_ext.checkpoint.huggingface.config import HuggingFaceModel, read_model, words_of
from megatron_ext.checkpoint.huggingface.names import (
    EMBEDDING,
    HEAD,
    VOCABULARY,
    RowShape,
    from_hf,
    hf_names,
)
from megatron_ext.checkpoint.huggingface.read import TensorFolder, TensorSource
from megatron_ext.checkpoint.huggingface.single_rank import (
    NO_TRAINING,
    ORIGIN,
    ORIGIN_CONFIG,
    PRECISIONS,
    build_bare,
    one_rank,
    row_shape,
)
from megatron_ext.checkpoint.huggingface.write import companions
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.paths import published
from megatron_ext.config import parse_args
from megatron_ext.errors import CheckpointError


@dataclass(frozen=True)
class Import:
    """How to import a model.

    Attributes:
        source: folder with config.json and safetensors.
        save: folder for the checkpoint.
        dtype: of the weights; None keeps the source's.
        tensor_parallel_size: that the padded vocabulary shall divide by, in any case.
        make_vocab_size_divisible_by: on each tensor-parallel rank.
        seq_length: that ``--use-checkpoint-args`` shall give; None takes the longest position.
    """

    source: Path
    save: Path
    dtype: str | None = None
    tensor_parallel_size: int = 1
    make_vocab_size_divisible_by: int = 128
    seq_length: int | None = None


def import_model(order: Import) -> list[str]:
    """Write a Hugging Face model as the checkpoint of iteration 0, for any layout.

    Returns:
        Words of a command line that trains the model.

    Raises:
        CheckpointError: a model that cannot be converted, or a folder that cannot be read or
            written.
    """
    model = read_model(order.source)
    if published(order.save):
        raise CheckpointError(f"`--save` ({order.save}) holds checkpoints; give a new folder.")
    with TensorFolder(order.source) as tensors:
        dtype = order.dtype or only_dtype(tensors)
        words = _words(model, order, dtype)
        keeping = ["--save", str(order.save), "--no-save-optim", "--no-save-rng"]
        config = parse_args([*words, *NO_TRAINING, *keeping], world_size=1, device="cpu").config
        with one_rank(config) as context:
            chunk = build_bare(config, context)
            fill(chunk, tensors, row_shape(config), vocab_size=model.vocab_size)
            CheckpointManager(config.checkpoint, context).save(
                0,
                model=[chunk],
                optimizer=None,
                scheduler=None,
                progress={"iteration": 0, "consumed_train_samples": 0},
                run_config={**config.to_dict(), ORIGIN: {ORIGIN_CONFIG: model.raw}},
            )
    return words


def _words(model: HuggingFaceModel, order: Import, dtype: str) -> list[str]:
    unit = order.make_vocab_size_divisible_by * order.tensor_parallel_size
    if min(order.make_vocab_size_divisible_by, order.tensor_parallel_size) < 1:
        raise CheckpointError(
            f"`--make-vocab-size-divisible-by` ({order.make_vocab_size_divisible_by}) and "
            f"`--target-tensor-parallel-size` ({order.tensor_parallel_size}) must be at least 1."
        )
    fields = {
        **model.fields,
        "seq_length": order.seq_length or model.fields["max_position_embeddings"],
        "make_vocab_size_divisible_by": order.make_vocab_size_divisible_by,
        "padded_vocab_size": -(-model.vocab_size // unit) * unit,
    }
    words = [*words_of(fields), *PRECISIONS[dtype]]
    if any(path.name.startswith("tokenizer") for path in companions(order.source)):
        folder = str(order.source.resolve())
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    return words


def only_dtype(tensors: TensorSource) -> str:
    """The dtype of all tensors, such as ``"bfloat16"``.

    Raises:
        CheckpointError: there are several, so that one would have to be rounded or widened.
    """
    found = sorted(set(tensors.dtypes().values()))
    if len(found) != 1:
        raise CheckpointError(
            f"{tensors.folder} holds tensors in {' and '.join(found) or 'no dtype'}, but a "
            "checkpoint has one dtype; give it as `--dtype`."
        )
    return found[0]


def fill(chunk: Any, tensors: TensorFolder, shape: RowShape, *, vocab_size: int) -> None:
    """Copy a Hugging Face model's tensors into our model, one parameter at a time.

    Rows that pad the vocabulary become zero.

    Args:
        chunk: the whole model, see `build_bare`.
        tensors: of the source.
        shape: of the attention.
        vocab_size: rows of the source's embedding.

    Raises:
        CheckpointError: a tensor is missing, left over, or of another shape.
    """
    parameters: dict[str, Tensor] = dict(chunk.named_parameters())
    _check_names(tensors, {full for name in parameters for full in hf_names(name).values()})
    with torch.no_grad():
        bar = tqdm(
            parameters.items(), "Importing", unit="tensor", delay=1.0, leave=False, disable=None
        )
        for name, parameter in bar:
            names = list(hf_names(name).values())
            theirs = {full: tensors.tensor(full) for full in names}
            value = from_hf(name, theirs, shape)
            is_vocabulary = names[0] in VOCABULARY
            target = parameter[:vocab_size] if is_vocabulary else parameter
            if target.shape != value.shape:
                raise CheckpointError(
                    f"{tensors.folder} holds `{' and '.join(names)}` with shape "
                    f"{list(value.shape)}, but its config.json implies {list(target.shape)}; copy "
                    "the whole model again."
                )
            target.copy_(value)
            if is_vocabulary:
                parameter[vocab_size:] = 0


def _check_names(tensors: TensorFolder, needed: set[str]) -> None:
    """Nothing is missing, and nothing would be lost."""
    missing = sorted(needed - tensors.names)
    if missing:
        tensors.tensor(missing[0])
    extra = {name for name in tensors.names - needed if not name.endswith("rotary_emb.inv_freq")}
    if HEAD in extra:
        if not torch.equal(tensors.tensor(HEAD), tensors.tensor(EMBEDDING)):
            raise CheckpointError(
                f"{tensors.folder} holds a `{HEAD}` of its own, but its config.json says "
                "`tie_word_embeddings` true; say false."
            )
        extra.remove(HEAD)
    if extra:
        raise CheckpointError(
            f"{tensors.folder} holds `{min(extra)}`, which a model of its `model_type` does not "
            "have; use a plain model for causal language modelling."
        )
