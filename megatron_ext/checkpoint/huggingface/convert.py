"""Whole folders: a Hugging Face model to a checkpoint of ours, and back.

Our model is built on one rank on the CPU, without initialization, so that one copy of the weights
is in memory, and a tensor or a file of them beside it.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.huggingface.config import (
    HuggingFaceModel,
    config_json,
    read_model,
    understand,
    words_of,
)
from megatron_ext.checkpoint.huggingface.names import (
    EMBEDDING,
    HEAD,
    VOCABULARY,
    RowShape,
    from_hf,
    hf_names,
)
from megatron_ext.checkpoint.huggingface.read import TensorFolder, torch_dtype
from megatron_ext.checkpoint.huggingface.write import (
    Exported,
    check_target,
    companions,
    write_folder,
)
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.paths import published, standing_folder_of
from megatron_ext.checkpoint.stored import choose, read_run_config
from megatron_ext.config import RunConfig, parse_args
from megatron_ext.device import select
from megatron_ext.errors import CheckpointError
from megatron_ext.layout import Layout, ParallelContext, init_groups, seed_everything
from megatron_ext.models.chunks import build_chunks
from megatron_ext.models.gpt import build_gpt_chunk
from megatron_ext.models.shards import shards_of
from megatron_ext.models.transformer_config import build_transformer_config, params_dtype

PRECISIONS = {"float32": [], "bfloat16": ["--bf16"], "float16": ["--fp16"]}
"""Flags of each dtype."""
_NO_TRAINING = "--micro-batch-size 1 --skip-train".split()
_SECTION, _ENTRY = "huggingface", "huggingface_config"
_NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state")


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


@dataclass(frozen=True)
class Export:
    """How to export a checkpoint.

    Attributes:
        load: folder of checkpoints.
        target: new folder for config.json and safetensors.
        step: iteration; None takes the latest.
        like: Hugging Face folder whose config.json and tokenizer files are followed.
        dtype: of the weights; None keeps the checkpoint's.
        vocab_size: rows of the vocabulary to write; None takes those of ``like``, then those of the
            model that was imported, then all, with padding.
        max_shard_size: of one file, in bytes or such as ``"5GB"``.
    """

    load: Path
    target: Path
    step: int | None = None
    like: Path | None = None
    dtype: str | None = None
    vocab_size: int | None = None
    max_shard_size: int | str = "5GB"


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
        dtype = order.dtype or _only_dtype(tensors)
        words = _words(model, order, dtype)
        keeping = ["--save", str(order.save), "--no-save-optim", "--no-save-rng"]
        config = parse_args([*words, *_NO_TRAINING, *keeping], world_size=1, device="cpu").config
        with one_rank(config) as context:
            chunk = build_bare(config, context)
            fill(chunk, tensors, row_shape(config), vocab_size=model.vocab_size)
            CheckpointManager(config.checkpoint, context).save(
                0,
                model=[chunk],
                optimizer=None,
                scheduler=None,
                progress={"iteration": 0, "consumed_train_samples": 0},
                run_config={**config.to_dict(), _SECTION: {_ENTRY: model.raw}},
            )
    return words


def _words(model: HuggingFaceModel, order: Import, dtype: str) -> list[str]:
    unit = order.make_vocab_size_divisible_by * order.tensor_parallel_size
    if unit < 1:
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


def _only_dtype(tensors: TensorFolder) -> str:
    """The dtype of all tensors.

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


def row_shape(config: RunConfig) -> RowShape:
    """The order of fused rows in a run's full weights."""
    model = config.model
    heads, channels = model.num_attention_heads, model.kv_channels
    assert heads is not None and channels is not None
    return RowShape(heads, model.num_query_groups or heads, channels)


@contextmanager
def one_rank(config: RunConfig) -> Iterator[ParallelContext]:
    """The groups of a single rank, taken down at the end.

    Raises:
        CheckpointError: several ranks were started.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:
        raise CheckpointError(
            f"Models are converted on one rank, but {os.environ['WORLD_SIZE']} were started; start "
            "the tool without torchrun."
        )
    device = select("gloo")
    device.activate(0)
    with tempfile.TemporaryDirectory(prefix="megatron_ext_") as folder:
        context = init_groups(Layout(1), device, init_method=f"file://{folder}/rendezvous")
        try:
            seed_everything(context, config.training.seed)
            yield context
        finally:
            context.destroy()


def build_bare(config: RunConfig, context: ParallelContext) -> Any:
    """The whole model on one rank on the CPU, in the run's dtype, with arbitrary weights."""
    model = dataclasses.replace(
        config.model, use_cpu_initialization=True, perform_initialization=False
    )
    config = dataclasses.replace(config, model=model)
    core = build_transformer_config(config)
    (chunk,) = build_chunks(build_gpt_chunk, config, core, context)
    return chunk.to(params_dtype(config))


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
        for name, parameter in parameters.items():
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


def export_model(order: Export) -> list[str]:
    """Write a checkpoint as a Hugging Face model.

    Returns:
        Notes on what the user may not expect.

    Raises:
        CheckpointError: a model that is no llama, mistral, qwen2 or qwen3, or a folder that cannot
            be read or written.
    """
    stored = read_run_config(order.load, order.step)
    config = _stored_run(order, stored)
    like = _like(order, stored)
    vocab_size, notes = _vocab_size(order, config, like)
    check_target(order.target)
    dtype = torch_dtype(order.dtype) if order.dtype else params_dtype(config)
    content = config_json(
        config.model,
        vocab_size=vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        like=like,
    )
    with one_rank(config) as context:
        chunk = build_bare(config, context)
        _check_nothing_is_lost(order, chunk)
        manager = CheckpointManager(config.checkpoint, context)
        manager.load(model=[chunk], optimizer=None, scheduler=None)
        exported = Exported(
            dict(chunk.named_parameters()), row_shape(config), vocab_size=vocab_size, dtype=dtype
        )
        write_folder(
            order.target,
            exported,
            content,
            like=order.like,
            max_shard_size=order.max_shard_size,
        )
    return notes


def _stored_run(order: Export, stored: dict[str, Any]) -> RunConfig:
    """The configuration that loads the weights alone on one rank."""
    if (stored.get("moe") or {}).get("num_experts"):
        raise CheckpointError(
            f"`--load` ({order.load}) holds a model with `--num-experts`, which cannot be exported; "
            "give a dense one."
        )
    precision = stored.get("precision") or {}
    words = [f"--{name}" for name in ("bf16", "fp16") if precision.get(name)]
    words += [*_NO_TRAINING, "--load", str(order.load), "--finetune"]
    words += [] if order.step is None else ["--ckpt-step", str(order.step)]
    return parse_args(words, world_size=1, device="cpu", checkpoint_config=stored).config


def _like(order: Export, stored: dict[str, Any]) -> HuggingFaceModel | None:
    """The model to follow: what the user gives, or what was imported."""
    if order.like is not None:
        return read_model(order.like)
    raw = (stored.get(_SECTION) or {}).get(_ENTRY)
    return None if raw is None else understand(raw, order.load / "run_config.json")


def _vocab_size(
    order: Export, config: RunConfig, like: HuggingFaceModel | None
) -> tuple[int, list[str]]:
    padded = config.model.padded_vocab_size or 0
    size = order.vocab_size or (like.vocab_size if like is not None else padded)
    if not 0 < size <= padded:
        raise CheckpointError(
            f"The vocabulary to export ({size}) must be at most the checkpoint's with padding "
            f"({padded}); give `--vocab-size`."
        )
    if order.vocab_size is None and like is None:
        note = "The padding of the vocabulary is exported too; `--vocab-size` leaves it out."
        return size, [note]
    return size, []


def _check_nothing_is_lost(order: Export, chunk: Any) -> None:
    """Refuse a checkpoint with weights that the exported model has no place for."""
    iteration = choose(order.load, order.step)
    assert iteration is not None
    path = standing_folder_of(order.load, iteration)
    known = {shard.name.split("[")[0] for shard in shards_of(chunk)}
    for name, entry in FileSystemReader(str(path)).read_metadata().state_dict_metadata.items():
        is_weight = isinstance(entry, TensorStorageMetadata) and not name.startswith(_NOT_WEIGHTS)
        if is_weight and name not in known:
            raise CheckpointError(
                f"{path} holds `{name}`, which the exported model would not have; export a "
                "checkpoint of the plain model."
            )
