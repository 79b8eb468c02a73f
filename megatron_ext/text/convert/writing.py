"""Writes model chunks, in any layout, as a folder of Hugging Face weights.

The first rank writes. It gathers one tensor at a time from the ranks that hold parts of it. Its
peak memory is therefore the model plus twice the largest tensor.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor
from tqdm import tqdm

from megatron_ext.checkpoint.conversion import weight_shards
from megatron_ext.checkpoint.safetensors_files import (
    plan_files,
    write_others,
    write_tensors,
    written_aside,
)
from megatron_ext.disk.writing import cleared, write_text
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.initialization import Shard
from megatron_ext.parallel.collectives import from_all_ranks, gather_or_raise, on_every_rank
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.convert.card import FILE as README
from megatron_ext.text.convert.card import MARK, read_card
from megatron_ext.text.convert.config import HuggingFaceModel
from megatron_ext.text.convert.quantization import ENTRY
from megatron_ext.text.convert.quantizing import Quantizer
from megatron_ext.text.convert.reading import OtherTensors
from megatron_ext.text.convert.table import Index, Shapes, Table, widen


@dataclass(frozen=True)
class Piece:
    """A block of a Hugging Face tensor whose values one rank holds.

    Attributes:
        rank: the rank that holds the block.
        shard: index, among the shards of ``rank``, of the shard that contains the block.
        rows: the rows of the shard that form the block.
        index: where the block lies in the Hugging Face tensor.
        transposed: whether the block must be transposed to fit the tensor.
    """

    rank: int
    shard: int
    rows: slice
    index: Index
    transposed: bool


@dataclass(frozen=True)
class Described:
    """The name, shape and position of a shard, without its values.

    Attributes:
        name: name of the parameter.
        full_shape: shape of the whole parameter.
        offset: index in the parameter at which the shard begins.
        shape: shape of the shard.
    """

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The tensors to write (on the meta device, without values) and their pieces, both by name.

    ``quantized`` names those that are stored with few bits.
    ``others`` are tensors that come from another folder instead of the model, or None.
    """

    tensors: dict[str, Tensor]
    pieces: dict[str, list[Piece]]
    quantized: frozenset[str] = frozenset()
    others: OtherTensors | None = None

    def with_others(self, others: OtherTensors) -> Plan:
        """Return a plan that also writes the tensors of a multimodal model's other parts."""
        tensors = {**self.tensors, **others.described}
        return replace(self, tensors={x: tensors[x] for x in sorted(tensors)}, others=others)

    @classmethod
    def of(
        cls,
        table: Table,
        by_rank: Sequence[Sequence[Described]],
        num_layers: int,
        dtype: torch.dtype,
        quantizer: Quantizer | None = None,
    ) -> Plan:
        """Plan which tensors of the Hugging Face checkpoint to write, and from which shards.

        ``by_rank`` lists, for each rank, the shards of our model's parameters that it holds;
        ``dtype`` is the dtype to write. Raise a CheckpointError if a parameter is not in the table.
        """
        shapes: Shapes = {}
        quantized = set[str]()
        pieces: dict[str, list[Piece]] = {}
        for rank, shards in enumerate(by_rank):
            for number, shard in enumerate(shards):
                runs = table.runs(shard.name, shard.full_shape[0], num_layers)
                if runs is None:
                    raise CheckpointError(
                        f"`{shard.name}` has no place in the Hugging Face model; export a "
                        "checkpoint of the plain model."
                    )
                if quantizer is not None and quantizer.quantizes(shard.name, runs):
                    quantized |= {run.tensor for run in runs}
                for run in runs:
                    widen(shapes, run.tensor, run.shape(shard.full_shape))
                    overlap = run.overlap(shard.offset, shard.shape)
                    if overlap is not None:
                        piece = Piece(rank, number, *overlap, run.transposed)
                        pieces.setdefault(run.tensor, []).append(piece)
        for copy, original in table.copies.items():
            if original in pieces:
                pieces[copy] = pieces[original]
                shapes[copy] = shapes[original]
        tensors = {
            name: torch.empty(
                shapes[name], dtype=torch.float32 if table.is_exact(name) else dtype, device="meta"
            )
            for name in sorted(pieces)
        }
        return cls(tensors, pieces, frozenset(quantized))


def write_model(
    target: Path,
    chunks: Sequence[torch.nn.Module],
    context: ParallelContext,
    table: Table,
    config: Mapping[str, Any],
    *,
    num_layers: int,
    dtype: torch.dtype,
    copied: Sequence[Path] = (),
    max_shard_size: int | str = "5GB",
    value_of: Callable[[Tensor], Tensor] = lambda parameter: parameter,
    generation: Mapping[str, Any] | None = None,
    quantizer: Quantizer | None = None,
    like: HuggingFaceModel | None = None,
    card: Callable[[], str] | None = None,
    template: Path | None = None,
    flag: str = "--hf",
) -> None:
    """Write the model of all ranks as a Hugging Face folder; all ranks call this together.

    The folder appears whole or not at all, and replaces an existing folder ``target``. If the first
    rank cannot write, all ranks raise a CheckpointError.

    Args:
        table: tells which Hugging Face tensors hold each of our parameters.
        config: the content of config.json.
        num_layers: number of decoder layers in the whole model.
        dtype: dtype to write.
        copied: files to copy, such as those of the tokenizer.
        max_shard_size: the largest size of a file, in bytes or as text like ``"5GB"``.
        value_of: maps a parameter to the values to write instead, in the same shape.
        generation: the content of generation_config.json. The file is not written if this is empty
            or ``copied`` has such a file.
        quantizer: stores the weights of linear layers with few bits; None writes plain values.
        like: the model from whose folder the tensors of other parts than the text come, if it is
            multimodal.
        card: returns the text of the model card, on the first rank. A card of a user's own in the
            folder to be replaced is kept.
        template: the file of the chat template that the model was trained with; None copies that of
            the tokenizer.
        flag: the flag that gave the target, for errors.
    """
    sender = _Sender(chunks, context, value_of)
    by_rank = gather_or_raise(sender.describe, f"{target} cannot be written")
    plan = Plan.of(table, by_rank, num_layers, dtype, quantizer)
    if like is not None and like.wrapping is not None:
        others = on_every_rank(lambda: OtherTensors(like), f"{target} cannot be written")
        plan = plan.with_others(others)
    stored = StoredTensors(plan, quantizer)
    files = plan_files(None, stored.described, max_shard_size, "model")
    # A weight is gathered when the first of the tensors that store it is written.
    order = dict.fromkeys(stored.origin[name] for names in files.values() for name in names)
    fault: CheckpointError | None = None
    if context.rank != 0:
        for name in order:
            sender.gather(plan, name)
    else:
        left = iter(order)
        values = stored.values(files, lambda: sender.gather(plan, next(left)))
        try:
            with written_aside(target, flag) as folder:
                count = sum(
                    x.numel() for name, x in plan.tensors.items() if name not in table.copies
                )
                plan_files(folder, stored.described, max_shard_size, "model", parameters=count)
                shown = {"unit": "file", "delay": 1.0, "leave": False, "disable": None}
                for file, names in tqdm(files.items(), "Writing", **shown):
                    write_tensors(folder / file, {x: stored.described[x] for x in names}, values)
                entry = (
                    {} if quantizer is None else {ENTRY: quantizer.entry(stored.plain_modules())}
                )
                write_others(folder, {**config, **entry}, copied)
                if template is not None:
                    shutil.copyfile(template, cleared(folder / "chat_template.jinja"))
                if card is not None:
                    _write_card(folder / README, target / README, card())
                settings = folder / "generation_config.json"
                if generation and not settings.exists():
                    write_text(settings, json.dumps(dict(generation), indent=2) + "\n")
        except CheckpointError as error:
            fault = error
        # Keep receiving after an error, since the other ranks would wait forever in their sends.
        for name in left:
            sender.gather(plan, name)
    from_all_ranks(None, fault)


def _write_card(path: Path, former: Path, card: str) -> None:
    """Write a model card, or copy the one in the folder to be replaced if a user has written it."""
    if former.is_file() and MARK not in (read_card(former) or ""):
        shutil.copyfile(former, cleared(path))
    else:
        write_text(path, card)


def gathered_tensors(
    chunk: torch.nn.Module,
    context: ParallelContext,
    table: Table,
    num_layers: int,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of a whole model on one rank, by name, one at a time."""
    sender = _Sender([chunk], context, lambda parameter: parameter)
    plan = Plan.of(table, [sender.describe()], num_layers, dtype)
    for name in plan.tensors:
        values = sender.gather(plan, name)
        assert values is not None
        yield name, values


class StoredTensors:
    """The tensors in the files of a folder, some of which store a weight together.

    Attributes:
        described: all of them by name, on the meta device.
        origin: the name of the weight that each of them stores.
    """

    def __init__(self, plan: Plan, quantizer: Quantizer | None) -> None:
        self._plan = plan
        self._quantizer = quantizer
        self.described: dict[str, Tensor] = {}
        self.origin: dict[str, str] = {}
        for name, tensor in plan.tensors.items():
            parts = {name: tensor}
            if quantizer is not None and name in plan.quantized:
                parts = quantizer.described(name, tensor)
            self.described |= parts
            self.origin |= dict.fromkeys(parts, name)

    def plain_modules(self) -> list[str]:
        """Return the names of the modules that have a matrix of plain values."""
        plain = self._plan.tensors.keys() - self._plan.quantized
        matrices = [x for x in plain if self._plan.tensors[x].dim() > 1 and x.endswith(".weight")]
        return sorted(name.removesuffix(".weight") for name in matrices)

    def values(
        self, files: Mapping[str, Sequence[str]], gather: Callable[[], Tensor | None]
    ) -> Iterator[Tensor]:
        """Yield the values of the tensors of all files, in order.

        ``gather`` returns the next weight, in the order in which the files begin them.
        """
        ready: dict[str, Tensor] = {}
        for name in (name for names in files.values() for name in names):
            if name not in ready:
                weight = gather()
                assert weight is not None
                origin = self.origin[name]
                if self._quantizer is not None and origin in self._plan.quantized:
                    ready |= self._quantizer.stored(origin, weight)
                else:
                    ready[name] = weight
                # No name holds the weight while the next one is gathered.
                del weight
            yield ready.pop(name)


class _Sender:
    """Sends the values of this rank's shards to the first rank."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        context: ParallelContext,
        value_of: Callable[[Tensor], Tensor],
    ) -> None:
        self._rank = context.rank
        self._value_of = value_of
        self._bare = unwrap_model(list(chunks))
        self._shards: list[Shard] = []
        self._owners: list[Tensor] = []

    def describe(self) -> list[Described]:
        """Describe the shards that this rank sends.

        Where several ranks hold the same shard, only the one with the main copy sends it.
        """
        owner: Tensor | None = None

        def placed(parameter: Any) -> Tensor:
            """Note whose shards come next; return a tensor with strides, if without memory."""
            nonlocal owner
            owner = parameter
            plain: Tensor = parameter
            if getattr(parameter, "quantized", None) is not None:
                return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            return plain

        for chunk in self._bare:
            for shard in weight_shards(chunk, placed):
                if shard.is_main:
                    assert owner is not None
                    self._shards.append(shard)
                    self._owners.append(owner)
        return [
            Described(x.name, x.full_shape, x.offset, tuple(x.tensor.shape)) for x in self._shards
        ]

    def gather(self, plan: Plan, name: str) -> Tensor | None:
        """Gather the Hugging Face tensor ``name`` on the first rank; elsewhere return None."""
        if plan.others is not None and name in plan.others.described:
            return plan.others.read(name) if self._rank == 0 else None
        described = plan.tensors[name]
        by_rank = dict[int, list[Piece]]()
        for piece in plan.pieces[name]:
            by_rank.setdefault(piece.rank, []).append(piece)
        if self._rank != 0:
            own = by_rank.get(self._rank)
            if own:
                torch.distributed.send(self._packed(own, described.dtype), 0)
            return None
        full = torch.empty(described.shape, dtype=described.dtype)
        for rank, pieces in by_rank.items():
            blocks = [full[piece.index] for piece in pieces]
            if rank == 0:
                for block, value in zip(blocks, self._values(pieces), strict=True):
                    block.copy_(value.view(block.shape))
                continue
            device = self._owners[0].device
            packed = full.new_empty(sum(x.numel() for x in blocks), device=device)
            torch.distributed.recv(packed, rank)
            parts = torch.split(packed.cpu(), [block.numel() for block in blocks])
            for block, part in zip(blocks, parts, strict=True):
                block.copy_(part.view(block.shape))
        return full

    def _packed(self, pieces: Sequence[Piece], dtype: torch.dtype) -> Tensor:
        """Return the values of pieces in ``dtype``, flattened and concatenated into one message."""
        return torch.cat([value.to(dtype).flatten() for value in self._values(pieces)])

    def _values(self, pieces: Sequence[Piece]) -> Iterator[Tensor]:
        """Yield the values of each piece, transposed where Hugging Face stores ``[in, out]``.

        A parameter's values may be slow to compute, for example by merging a LoRA adapter, so
        consecutive pieces of one parameter share one computation.
        """
        last = replaced = None
        for piece in pieces:
            shard = self._shards[piece.shard]
            owner = self._owners[piece.shard]
            if owner is not last:
                last = owner
                replaced = self._value_of(owner).detach().contiguous()
            assert replaced is not None
            # The position of the shard within its parameter; `replaced` has the same strides.
            start = shard.tensor.storage_offset() - owner.storage_offset()
            start += replaced.storage_offset()
            shape = shard.tensor.shape
            values = replaced.as_strided(shape, shard.tensor.stride(), start)[piece.rows]
            yield values.t() if piece.transposed else values
