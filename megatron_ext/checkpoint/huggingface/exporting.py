"""A checkpoint of ours as a Hugging Face model.

One copy of the weights is in memory, and the tensors of one file beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.ema import PREFIX, holds_averages
from megatron_ext.checkpoint.huggingface.config import (
    HuggingFaceModel,
    config_json,
    read_model,
    understand,
)
from megatron_ext.checkpoint.huggingface.read import torch_dtype
from megatron_ext.checkpoint.huggingface.single_rank import (
    NO_TRAINING,
    ORIGIN,
    ORIGIN_CONFIG,
    build_bare,
    one_rank,
    row_shape,
)
from megatron_ext.checkpoint.huggingface.write import Exported, check_target, write_folder
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.paths import standing_folder_of
from megatron_ext.checkpoint.stored import choose, read_run_config
from megatron_ext.checkpoint.unpickling import stored_entries
from megatron_ext.config import RunConfig, parse_args
from megatron_ext.errors import CheckpointError
from megatron_ext.layout import ParallelContext
from megatron_ext.models.fp8.scaling import HISTORY
from megatron_ext.models.shards import shards_of
from megatron_ext.models.transformer_config import params_dtype
from megatron_ext.optim.ema import ShardedEMA

_NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", PREFIX)


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
        ema: the averaged weights (``--ema-decay``), in place of the last ones.
    """

    load: Path
    target: Path
    step: int | None = None
    like: Path | None = None
    dtype: str | None = None
    vocab_size: int | None = None
    max_shard_size: int | str = "5GB"
    ema: bool = False


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
        weights = _load(order, config, context, chunk)
        exported = Exported(weights, row_shape(config), vocab_size=vocab_size, dtype=dtype)
        write_folder(
            order.target,
            exported,
            content,
            like=order.like,
            max_shard_size=order.max_shard_size,
        )
    return notes


def _load(
    order: Export, config: RunConfig, context: ParallelContext, chunk: Any
) -> dict[str, Tensor]:
    """The weights to export by name; averaged ones in fp32, whatever the model's dtype."""
    ema = ShardedEMA([chunk], None) if order.ema else None
    manager = CheckpointManager(config.checkpoint, context)
    manager.load(model=[chunk], optimizer=None, scheduler=None, ema=ema)
    averages = {} if ema is None else dict(ema.gathered())
    return {name: averages.get(weight, weight) for name, weight in chunk.named_parameters()}


def _stored_run(order: Export, stored: dict[str, Any]) -> RunConfig:
    """The configuration that loads the weights alone on one rank."""
    if (stored.get("moe") or {}).get("num_experts"):
        raise CheckpointError(
            f"`--load` ({order.load}) holds a model with `--num-experts`, which cannot be "
            "exported; give a dense one."
        )
    precision = stored.get("precision") or {}
    words = [f"--{name}" for name in ("bf16", "fp16") if precision.get(name)]
    words += [*NO_TRAINING, "--load", str(order.load)]
    # Averages belong to what a run goes on with, not to the weights that another starts from.
    words += ["--no-load-optim", "--no-load-rng"] if order.ema else ["--finetune"]
    words += [] if order.step is None else ["--ckpt-step", str(order.step)]
    return parse_args(words, world_size=1, device="cpu", checkpoint_config=stored).config


def _like(order: Export, stored: dict[str, Any]) -> HuggingFaceModel | None:
    """The model to follow: what the user gives, or what was imported."""
    if order.like is not None:
        return read_model(order.like)
    raw = (stored.get(ORIGIN) or {}).get(ORIGIN_CONFIG)
    return None if raw is None else understand(raw, order.load / "run_config.json")


def _vocab_size(
    order: Export, config: RunConfig, like: HuggingFaceModel | None
) -> tuple[int, list[str]]:
    padded = config.model.padded_vocab_size or 0
    size = like.vocab_size if like is not None else padded
    size = size if order.vocab_size is None else order.vocab_size
    if not 0 < size <= padded:
        raise CheckpointError(
            f"The vocabulary to export ({size}) must be at least 1 and at most the "
            f"checkpoint's with padding ({padded}); give `--vocab-size`."
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
    if order.ema and not holds_averages(path):
        raise CheckpointError(
            f"{path} holds no averaged weights, which only a run with `--ema-decay` saves; leave "
            "out `--ema`."
        )
    known = {shard.name.split("[")[0] for shard in shards_of(chunk)}
    for name, entry in stored_entries(path).items():
        is_weight = isinstance(entry, TensorStorageMetadata) and not name.startswith(_NOT_WEIGHTS)
        if is_weight and name not in known and not name.endswith(HISTORY):
            raise CheckpointError(
                f"{path} holds `{name}`, which the exported model would not have; export a "
                "checkpoint of the plain model."
            )
