"""Imports the weights of a checkpoint of Megatron-LM or DeepSpeed as a checkpoint of iteration 0.

The peak memory is one copy of the weights plus twice the largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.checkpoint import conversion
from megatron_ext.checkpoint.files import TRACKER, folder_of, short_text
from megatron_ext.config.model import padded_size
from megatron_ext.config.parser import parse_args
from megatron_ext.config.precision import PRECISIONS
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.initialization import Shard
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.convert.foreign import distributed, rank_files, sharded, universal
from megatron_ext.text.convert.foreign.arguments import sections_of, tokenizer_of
from megatron_ext.text.convert.foreign.source import Key, Source, key_of, shown
from megatron_ext.text.convert.huggingface import NO_TRAINING, build_bare
from megatron_ext.text.task import TEXT

_HEAD = "output_layer.weight"
_TRACKERS = (TRACKER, "latest_universal", "latest")
"""Files in a folder of checkpoints that name the latest one."""


@dataclass(frozen=True)
class ForeignImport:
    """The options of an import from the checkpoint ``source`` to the new folder ``save``.

    Attributes:
        source: folder of the checkpoint, or of checkpoints with a file that names the latest.
        step: iteration of the checkpoint; None takes the latest.
        dtype: dtype of the new checkpoint; None keeps that of the source's embedding.
    """

    source: Path
    save: Path
    step: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class _Form:
    """A form of checkpoints.

    Attributes:
        name: the form's name, for the user.
        fits: tells whether a folder is of the form.
        open: opens a folder.
        loads: fills a whole model from the folder; None if `Source.tensors` has the weights.
    """

    name: str
    fits: Callable[[Path], bool]
    open: Callable[[Path], Source]
    loads: Callable[[Path, Any, ParallelContext], None] | None = None


_FORMS = (
    _Form(
        "Megatron-LM's `torch_dist`",
        distributed.is_distributed,
        distributed.open_distributed,
        distributed.load_distributed,
    ),
    _Form("Megatron-LM's `torch`", rank_files.is_torch_format, rank_files.open_torch_format),
    _Form("Megatron-LM's `fsdp_dtensor`", sharded.is_sharded, sharded.open_sharded),
    _Form("DeepSpeed's universal checkpoint", universal.is_universal, universal.open_universal),
    _Form("DeepSpeed's model states", rank_files.is_deepspeed, rank_files.open_deepspeed),
)


def import_foreign(order: ForeignImport) -> tuple[list[str], list[str]]:
    """Write the weights of a checkpoint of another program as a checkpoint of iteration 0.

    Return the flags with which a run loads it, and notes for the user.

    Raises:
        CheckpointError: the source is not a GPT in one of the forms, or the folder for the new
            checkpoint holds checkpoints.
    """
    conversion.refuse_checkpoints(order.save)
    folder = _folder(order)
    form = next((form for form in _FORMS if form.fits(folder)), None)
    if form is None:
        raise CheckpointError(_unknown(folder))
    source = form.open(folder)
    with source.opened:
        config, words, notes = _configuration(source, order)
        with conversion.one_rank(config.training.seed) as context:
            chunk = build_bare(config, context)
            if form.loads is None:
                for shard in conversion.weight_shards(chunk):
                    _fill(shard, source, config)
                notes += _check_rest(source, config)
            else:
                form.loads(folder, chunk, context)
            conversion.save_imported(chunk, config.checkpoint, context, config.to_dict())
    said = "" if source.iteration is None else f" of iteration {source.iteration}"
    notes.insert(0, f"{folder} is {form.name}{said}; only its weights are imported")
    root = str(order.save.resolve())
    return ["--load", root, "--finetune", "--use-checkpoint-args", *words], notes


def _folder(order: ForeignImport) -> Path:
    """Return the folder of the checkpoint to import."""
    root = order.source
    if not root.is_dir():
        raise CheckpointError(f"`--checkpoint` ({root}) is no folder; give one with a checkpoint.")
    if order.step is not None:
        places = [folder_of(root, order.step), root / f"global_step{order.step}"]
        places += [place.with_name(f"{place.name}_universal") for place in places]
        found = next((place for place in reversed(places) if place.is_dir()), None)
        if found is None:
            raise CheckpointError(
                f"`--ckpt-step` ({order.step}) is no checkpoint in {root}; give another iteration."
            )
        return found
    for tracker in _TRACKERS:
        path = root / tracker
        name = short_text(path)
        if name is not None:
            named = folder_of(root, int(name)) if name.isdecimal() else root / Path(name).name
            if not named.is_dir():
                raise CheckpointError(
                    f"{path} names {name!r}, but {named} does not exist; give `--ckpt-step`."
                )
            return named
    return root


def _unknown(folder: Path) -> str:
    if (folder / "config.json").is_file():
        return f"{folder} is a Hugging Face model; give it with `--hf`."
    known = ", ".join(form.name for form in _FORMS)
    return f"{folder} is none of the forms that can be imported ({known}); give another folder."


def _configuration(source: Source, order: ForeignImport) -> tuple[RunConfig, list[str], list[str]]:
    """Return the configuration of the model that ``source`` holds, and notes.

    Between them return the flags of its precision and tokenizer, which runs do not take from a
    checkpoint.
    """
    sections: dict[str, dict[str, Any]] = sections_of(source.arguments, source.path)
    model = sections["model"]
    model["padded_vocab_size"] = padded_size(
        source.vocabulary, model.get("make_vocab_size_divisible_by") or 1, 1
    )
    model["untie_embeddings_and_output_weights"] = bool(
        model.get("untie_embeddings_and_output_weights")
    )
    tokenizer, notes = tokenizer_of(source.arguments)
    dtype = order.dtype or str(source.dtype).removeprefix("torch.")
    if dtype not in PRECISIONS:
        raise CheckpointError(
            f"{source.path} holds weights in {dtype}; give `--dtype`, one of "
            f"{', '.join(PRECISIONS)}."
        )
    keeping = ["--save", str(order.save), "--no-save-optim", "--no-save-rng"]
    words = [*PRECISIONS[dtype], *tokenizer]
    given = [*words, *NO_TRAINING, *keeping]
    parsed = parse_args(given, TEXT, world_size=1, device="cpu", checkpoint_config=sections)
    return parsed.config, words, notes


@torch.no_grad()
def _fill(shard: Shard, source: Source, config: RunConfig) -> None:
    """Copy the values of a parameter of the whole model, or of a half of it, from ``source``."""
    key = key_of(shard.name)
    rest = shard.name.split("[")[0]
    gated = config.model.gated and "linear_fc1." in rest and "layer_norm" not in rest
    is_part = shard.full_shape != tuple(shard.tensor.shape)
    stored = source.take(key)
    if is_part and not all(
        start + size == full
        for start, size, full in zip(
            shard.offset, shard.tensor.shape, shard.full_shape, strict=True
        )
    ):
        # Another half follows.
        source.tensors[key] = stored
    whole = stored.whole(shard.full_shape, gated=gated, is_vocabulary=shard.is_vocabulary)
    shard.tensor.copy_(shard.cut(whole))


def _check_rest(source: Source, config: RunConfig) -> list[str]:
    """Return notes on what was not imported.

    Raise a CheckpointError if a weight was not: the model of the flags has no place for it.
    """
    head = source.tensors.pop(_HEAD, None)
    if head is not None and not config.model.untie_embeddings_and_output_weights:
        source.unused[_HEAD] = "a copy of the embedding, to which it is tied"
    elif head is not None:
        source.tensors[_HEAD] = head
    if source.tensors:
        left: list[Key] = sorted(source.tensors, key=str)
        raise CheckpointError(
            f"{source.path} holds {len(left)} weight(s) for which the model of its flags has no "
            f"place, such as `{shown(left[0])}`; give a checkpoint of a plain GPT."
        )
    by_reason: dict[str, list[str]] = {}
    for name, reason in source.unused.items():
        by_reason.setdefault(reason, []).append(name)
    return [
        f"left out ({reason}): {', '.join(f'`{name}`' for name in listed[:3])}"
        + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
        for reason, listed in by_reason.items()
    ]
