"""Accounts for every tensor of a Hugging Face folder, and compares what models compute with it.

Tensors are accounted for without reading their values, so that a folder of any size takes little
memory. Logits need the model twice in float32, here and in transformers; they are compared where
that fits into the memory that is free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from megatron_ext.checkpoint import conversion
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.convert import huggingface
from megatron_ext.text.convert.config import HuggingFaceModel, read_model
from megatron_ext.text.convert.reading import (
    EMBEDDING,
    HEAD,
    WeightFolder,
    load_folder,
    reasons_to_skip,
    without_missing_depths,
)
from megatron_ext.text.convert.table import Shapes, widen
from megatron_ext.text.convert.writing import gathered_tensors
from megatron_ext.text.task import TEXT

GOOD = ("used", "tied", "skipped")
BAD = ("missing", "unexpected", "unreadable", "differs")
_SHOWN = 10
TOLERANCE = huggingface.TOLERANCES[torch.float32]
"""The largest difference in float32 that rounding explains, relative to the largest value."""


@dataclass(frozen=True)
class Verify:
    """The options of a verification of the Hugging Face folder ``source``.

    Attributes:
        load: folder of checkpoints to compare with the folder; None compares the folder alone.
        step: iteration of the checkpoint; None takes the latest.
        logits: whether to compare logits with those of transformers.
    """

    source: Path
    load: Path | None = None
    step: int | None = None
    logits: bool = True


@dataclass(frozen=True)
class TensorRow:
    """A tensor's name, what becomes of it (one of `GOOD` or `BAD`), and the reason, if any."""

    name: str
    status: str
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """How far our values are from those of transformers, relative to their largest.

    Attributes:
        places: the difference after each part of the model, from the embedding to the logits.
    """

    places: Mapping[str, float]

    @property
    def logits(self) -> float:
        return self.places["logits"]

    @property
    def first(self) -> str | None:
        """Return the first part whose output differs by more than rounding; None if none does."""
        # A NaN is no small difference.
        return next((x for x, value in self.places.items() if not value <= TOLERANCE), None)


@dataclass
class Verification:
    """The result of a verification."""

    folder: Path
    rows: list[TensorRow]
    notes: list[str] = field(default_factory=list)
    comparison: Comparison | None = None

    @property
    def is_right(self) -> bool:
        """Tell whether all tensors are accounted for, and nothing differs."""
        rows = all(row.status in GOOD for row in self.rows)
        return rows and (self.comparison is None or self.comparison.first is None)

    def as_json(self) -> dict[str, Any]:
        places = None if self.comparison is None else dict(self.comparison.places)
        first = None if self.comparison is None else self.comparison.first
        return {
            "folder": str(self.folder),
            "right": self.is_right,
            "tensors": [dataclasses.asdict(row) for row in self.rows],
            "differences": places,
            "first_difference": first,
            "tolerance": TOLERANCE,
            "notes": self.notes,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of a report."""
        yield f"{self.folder}: {len(self.rows)} tensors"
        for status in (*GOOD, *BAD):
            rows = [row for row in self.rows if row.status == status]
            if rows or status in GOOD:
                yield f"  {status:<11} {len(rows)}"
            reasons = dict.fromkeys(row.reason for row in rows if row.reason)
            for reason in list(reasons)[:_SHOWN]:
                names = [row.name for row in rows if row.reason == reason]
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                yield f"    {', '.join(names[:3])}{more}: {reason}"
            if len(reasons) > _SHOWN:
                yield f"    and {len(reasons) - _SHOWN} more, which `--json` lists"
        for note in self.notes:
            yield f"> {note}"
        if self.comparison is None:
            return
        difference = f"{self.comparison.logits:.1e}"
        yield f"logits differ from those of transformers by {difference} of the largest"
        if self.comparison.first is not None:
            yield f"the first difference above {TOLERANCE:g} is after: {self.comparison.first}"
            yield from (f"  {x:<12} {value:.1e}" for x, value in self.comparison.places.items())


def verify_folder(order: Verify) -> Verification:
    """Account for the tensors of a folder, and compare its model with transformers'.

    With ``order.load``, also compare each tensor with the checkpoint, and take the checkpoint's
    weights for the logits. Raise a CheckpointError if a folder cannot be read.
    """
    model = without_missing_depths(read_model(order.source))
    config = _config(order, model)
    with conversion.one_rank(config.training.seed) as context:
        # Nothing has been written into the parameters, so they take addresses but no memory.
        chunk = huggingface.build_bare(config, context)
        with WeightFolder(model) as source:
            table = model.table(source.shapes())
            needs = _needs(chunk, table, model)
            rows = list(_rows(source, table, needs, model))
            notes = [*model.notes(), *source.notes()]
            found = Verification(order.source, rows, notes)
            if any(row.status in BAD for row in rows):
                notes.append("nothing was computed, since the tensors are not those of the model")
                return found
            if order.load is not None:
                _load(config, chunk, context)
                found.rows = _compared(found.rows, chunk, context, source, model)
        if order.logits:
            found.comparison = _comparison(order, config, chunk, context, model, notes)
    return found


def _config(order: Verify, model: HuggingFaceModel) -> RunConfig:
    """Return the configuration of the folder's model in float32, or that of the checkpoint."""
    if order.load is not None:
        stored = read_run_config(order.load, order.step)
        given = huggingface.Export(order.load, order.load, step=order.step)
        return huggingface.stored_run(given, stored)
    imported = huggingface.Import(order.source, order.source, make_vocab_size_divisible_by=1)
    words = huggingface.words_of_model(model, imported, "float32")
    flags = [*words, *huggingface.NO_TRAINING]
    return parse_args(flags, TEXT, world_size=1, device="cpu").config


def _needs(chunk: Any, table: Any, model: HuggingFaceModel) -> Shapes:
    """Return the shapes of the tensors that hold the parameters of our whole model, by name."""
    needs: Shapes = {}
    for shard in conversion.weight_shards(chunk):
        runs = table.runs(shard.name, shard.full_shape[0], model.fields["num_layers"])
        if runs is None:
            raise CheckpointError(
                f"`--load` holds `{shard.name}`, for which a {model.family.model_type} model has "
                "no place; give the folder that the checkpoint began with."
            )
        for run in runs:
            widen(needs, run.tensor, run.shape(shard.full_shape))
    return needs


def _rows(
    source: WeightFolder, table: Any, needs: Shapes, model: HuggingFaceModel
) -> Iterator[TensorRow]:
    """Yield what becomes of each tensor of the folder, and of each that it lacks."""
    shapes = source.shapes()
    for name in sorted(needs.keys() - shapes.keys()):
        yield TensorRow(name, "missing", f"its shape must be {list(needs[name])}")
    extra = shapes.keys() - needs.keys()
    skipped = reasons_to_skip(source, table, extra, model)
    weight_of = {part: x.name for x in source.quantized.values() for part in x.tensors}
    embedding, head = (table.outer[name][0].tensor for name in (EMBEDDING, HEAD))
    for name in sorted(source.stored_names):
        weight = weight_of.get(name, name)
        if name in source.unused:
            yield TensorRow(name, "skipped", "only inference with quantized activations uses it")
        elif weight in source.others:
            yield TensorRow(name, "skipped", "it is not of the text model")
        elif weight in needs:
            yield _needed(source, name, weight, shapes[weight], needs[weight])
        elif weight in table.copies:
            yield TensorRow(name, "tied", f"a copy of `{table.copies[weight]}`")
        elif weight in skipped:
            yield TensorRow(name, "skipped", skipped[weight])
        elif weight == head and torch.equal(source.whole(head), source.whole(embedding)):
            yield TensorRow(name, "tied", f"a copy of `{embedding}`")
        else:
            yield TensorRow(name, "unexpected", f"a {model.family.model_type} model has no such")


def _needed(
    source: WeightFolder, name: str, weight: str, shape: Sequence[int], needed: Sequence[int]
) -> TensorRow:
    try:
        source.check_kind(weight)
    except CheckpointError as error:
        return TensorRow(name, "unreadable", str(error))
    if tuple(shape) != tuple(needed):
        return TensorRow(name, "unreadable", f"its shape is {list(shape)}, not {list(needed)}")
    return TensorRow(name, "used")


def _load(config: RunConfig, chunk: Any, context: ParallelContext) -> None:
    manager = CheckpointManager(config.checkpoint, context)
    manager.load(model=[chunk], optimizer=None, scheduler=None)


def _compared(
    rows: Sequence[TensorRow],
    chunk: Any,
    context: ParallelContext,
    source: WeightFolder,
    model: HuggingFaceModel,
) -> list[TensorRow]:
    """Return the rows, in which weights that differ from those of our model are marked.

    Values of the folder are rounded to the dtype of our model.
    """
    different: dict[str, str] = {}
    table = model.table(source.shapes())
    kept = next(chunk.parameters()).dtype
    for name, ours in gathered_tensors(chunk, context, table, model.fields["num_layers"], kept):
        if name not in source.names:
            continue
        theirs = source.whole(name, ours.dtype).to(ours.dtype)
        if not torch.equal(ours, theirs):
            largest = float((ours.float() - theirs.float()).abs().max())
            different[name] = f"by up to {largest:.1e} from the checkpoint"
    weight_of = {part: x.name for x in source.quantized.values() for part in x.tensors}
    return [
        dataclasses.replace(row, status="differs", reason=different[weight])
        if (weight := weight_of.get(row.name, row.name)) in different
        else row
        for row in rows
    ]


def _comparison(
    order: Verify,
    config: RunConfig,
    chunk: Any,
    context: ParallelContext,
    model: HuggingFaceModel,
    notes: list[str],
) -> Comparison | None:
    """Compare our model with transformers'; return None, and add a note, if that is impossible."""
    count = sum(parameter.numel() for parameter in chunk.parameters())
    needed = 2 * 4 * count
    free = psutil.virtual_memory().available
    if needed > free:
        notes.append(
            f"logits were not compared: two models in float32 take {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB of memory are free"
        )
        return None
    try:
        reference = huggingface.reference_model(model)
    # transformers raises errors of many classes where it lacks a package or a number format.
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        notes.append(f"logits were not compared: transformers cannot load the folder ({reason})")
        return None
    if order.load is None:
        load_folder([chunk], order.source, context)
    chunk = in_float32(chunk, config, context)
    return compare_models(chunk, reference, model)


def in_float32(chunk: Any, config: RunConfig, context: ParallelContext) -> Any:
    """Return our model in float32; a copy unless it already is."""
    if next(chunk.parameters()).dtype == torch.float32:
        return chunk
    precision = dataclasses.replace(config.precision, bf16=False, fp16=False)
    wide = huggingface.build_bare(dataclasses.replace(config, precision=precision), context)
    with torch.no_grad():
        for own, other in zip(wide.parameters(), chunk.parameters(), strict=True):
            own.copy_(other)
        for own, other in zip(wide.buffers(), chunk.buffers(), strict=True):
            own.copy_(other)
    return wide


@torch.no_grad()
def compare_models(chunk: Any, reference: Any, model: HuggingFaceModel) -> Comparison:
    """Return how far the outputs of our model's parts are from those of transformers' model."""
    tokens = huggingface.reference_tokens(model)
    ours: dict[str, Tensor] = {}
    last = len(chunk.decoder.layers) - 1

    def keep(name: str, value: Tensor) -> None:
        ours[name] = value.transpose(0, 1)

    hooks = []
    for number, layer in enumerate(chunk.decoder.layers):
        name = f"layer {number - 1}" if number else "embedding"
        hooks.append(layer.register_forward_pre_hook(_keeps_input(keep, name), with_kwargs=True))
    final = chunk.decoder.final_layernorm
    hooks.append(final.register_forward_hook(lambda *x: keep(f"layer {last}, norm", x[-1])))
    try:
        positions = torch.arange(tokens.shape[1])[None]
        logits = chunk.eval()(tokens, positions, None)[..., : model.vocab_size]
    finally:
        for hook in hooks:
            hook.remove()
    output = reference.eval()(tokens, output_hidden_states=True, use_cache=False)
    # transformers lists the input of each layer, then the output of the last norm.
    theirs = dict(zip(ours, output.hidden_states, strict=True)) | {"logits": output.logits}
    ours["logits"] = logits
    return Comparison({name: _difference(ours[name], x) for name, x in theirs.items()})


def _keeps_input(keep: Any, name: str) -> Any:
    """Return a hook that passes the input of a layer, ``[s, b, h]``, to ``keep``."""

    def hook(layer: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        keep(name, args[0] if args else options["hidden_states"])

    return hook


def _difference(ours: Tensor, theirs: Tensor) -> float:
    largest = theirs.float().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((ours.float() - theirs.float()).abs().max() / largest)
