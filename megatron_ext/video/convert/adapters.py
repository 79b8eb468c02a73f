"""Maps LoRA adapters of a video network to the layers of its published forms, and back.

Our layers and the public ones differ (r rank, p number of projections that a layer of ours joins):

- Ours joins several public layers, such as those to queries, keys and values. A matrix A that they
  share becomes a copy for each; separate ones, ``[p * r, in]``
  (``--lora-separate-projections``), are theirs.
- A public layer joins several of ours by rows of B or by columns of A, such as ``linear1`` and
  ``linear2`` of FLUX.1. Its adapter is cut for ours, without loss. Ours leave as one of rank r if
  they have the same A, or the same B; else as one of the sum of the ranks, with zeros in B or A
  where one of ours has no part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from megatron_ext.checkpoint.adapter_files import (
    AdapterFile,
    LowRank,
    Pairs,
    PublicLayers,
    flattened,
)
from megatron_ext.checkpoint.adapter_forms import AdapterForm
from megatron_ext.config.lora_targets import is_named, kind_of
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.video.convert.find import sizes_of, writer_of
from megatron_ext.video.networks.published import Conversion, Form, Mapped, Part

_BLOCK = re.compile(r"^.*?\.\d+\.")
"""The beginning of a layer's name that differs between blocks, such as ``blocks.3.``."""


def adapters_of(run: RunConfig, form: AdapterForm, network: str | None = None) -> PublicLayers:
    """Return how the adapters of a video run map to the layers of a published form.

    ``network`` chooses a network of a streaming run, ``"generator"`` (None) or ``"critic"``.

    Raises:
        CheckpointError: the run's network has no public form, or not this one.
    """
    conversion = writer_of(run.to_dict())
    assert conversion is not None
    names = conversion.namings
    naming = next((x for x in form.naming if x in names), None)
    if form.naming and naming is None:
        raise CheckpointError(
            f"`--format {form.name}` needs names of {conversion.title} which are not known; give "
            "diffusers."
        )
    sizes = sizes_of(run, network)
    return layers_of(conversion, sizes, run.lora.lora_rank or 0, naming)


def layers_of(
    conversion: Conversion, sizes: Any, rank: int, naming: str | None = None
) -> PublicLayers:
    """Return the mapping of our LoRA adapters, of rank ``rank``, to layers of a form.

    ``naming`` is the form's name; None stands for the first. Adapters of a form of diffusers,
    exported as peft's, are loaded by the method ``load_lora_adapter`` with
    ``prefix="base_model.model"``.
    """
    places = AdapterMap(conversion, conversion.form(naming), sizes)
    layer = places.pattern
    pattern = re.compile(rf"(?:critic\.)?(?P<layer>{layer})\.lora\.(?P<matrix>[ab])$")

    def pairs(matrices: Mapping[str, Tensor]) -> Pairs:
        found: dict[str, dict[str, Tensor]] = {}
        for name, values in matrices.items():
            match = pattern.match(name)
            assert match is not None
            found.setdefault(match["layer"], {})[match["matrix"]] = values
        return places.to_public({name: (x["a"], x["b"]) for name, x in found.items()}, rank)

    every = frozenset(
        tensor.removesuffix(".weight")
        for tensor in places.mapped.shapes
        if tensor.endswith(".weight")
    )
    return PublicLayers(pattern, pairs, partial(_BLOCK.sub, ""), None, every)


@dataclass(frozen=True)
class Piece:
    """The part of an adapter that one projection of a layer of ours has in a public layer.

    Attributes:
        layer: name of our layer.
        projection: index of the projection; 0 if the layer is one.
        rows: which rows of ours it has.
        parts: where these rows lie in the public layer.
    """

    layer: str
    projection: int
    rows: Tensor
    parts: Sequence[Part]


@dataclass(frozen=True)
class AdapterMap:
    """Where the adapters of a network lie in the layers of a form of its published weights.

    Attributes:
        sizes: the network's sizes.
    """

    conversion: Conversion
    form: Form
    sizes: Any

    @property
    def pattern(self) -> str:
        """Return a regular expression of the names of our layers that can have adapters."""
        if self.conversion.adapted is None:
            raise CheckpointError(
                f"Adapters of {self.conversion.title} have no public form, since none of its "
                "layers takes any."
            )
        return self.conversion.adapted.pattern.removesuffix("$")

    @cached_property
    def mapped(self) -> Mapped:
        return Mapped.of(self.form, self.sizes, self.conversion.parameters(self.sizes))

    @cached_property
    def _first(self) -> Mapped:
        """Return the map of the network's first form, which has a layer for each projection."""
        parameters = self.conversion.parameters(self.sizes)
        return Mapped.of(self.conversion.forms[0], self.sizes, parameters)

    @cached_property
    def layers(self) -> list[str]:
        """Return the names of our layers that can have adapters, in module order."""
        name = re.compile(self.pattern)
        weights = {
            parameter.removesuffix(".weight"): shape
            for parameter, shape in self.mapped.parameters.items()
            if parameter.endswith(".weight")
        }
        return [x for x, shape in weights.items() if len(shape) == 2 and name.fullmatch(x)]

    def shape(self, layer: str) -> tuple[int, ...]:
        """Return the shape of our layer's weight."""
        return self.mapped.parameters[f"{layer}.weight"]

    def projections(self, layer: str) -> list[list[Part]]:
        """Return the rows of each projection of our layer, as parts of the first form."""
        by_tensor: dict[str, list[Part]] = {}
        for part in self._first.parts[f"{layer}.weight"]:
            by_tensor.setdefault(part.tensor, []).append(part)
        return list(by_tensor.values())

    @cached_property
    def pieces(self) -> dict[str, list[Piece]]:
        """Return the pieces of each public layer, by its name."""
        found: dict[str, list[Piece]] = {}
        for layer in self.layers:
            by_tensor: dict[str, list[Part]] = {}
            for part in self.mapped.parts[f"{layer}.weight"]:
                by_tensor.setdefault(part.tensor, []).append(part)
            for tensor, parts in by_tensor.items():
                there = _rows_of(parts, self.shape(layer)[0])
                for index, own in enumerate(self.projections(layer)):
                    rows = there & _rows_of(own, self.shape(layer)[0])
                    if rows.any():
                        name = tensor.removesuffix(".weight")
                        found.setdefault(name, []).append(Piece(layer, index, rows, parts))
        return found

    def to_public(self, ours: Pairs, rank: int) -> Pairs:
        """Return the adapters of our layers, of rank ``rank``, as those of public layers."""
        found = dict[str, tuple[Tensor, Tensor]]()
        for public, pieces in self.pieces.items():
            placed = list[tuple[Tensor, Tensor]]()
            outputs, inputs = self.mapped.shapes[f"{public}.weight"]
            for layer in dict.fromkeys(piece.layer for piece in pieces if piece.layer in ours):
                a, b = ours[layer]
                own = [piece for piece in pieces if piece.layer == layer]
                if len(a) == rank:  # one A for all projections
                    rows = torch.stack([piece.rows for piece in own]).any(0)
                    own = [Piece(layer, 0, rows, own[0].parts)]
                for piece in own:
                    low = a[piece.projection * rank :][:rank]
                    there = a.new_zeros(len(low), inputs)
                    column = piece.parts[0].column
                    there[:, column : column + low.size(1)] = low
                    high = b.new_zeros(outputs, rank)
                    kept = torch.where(piece.rows.unsqueeze(1), b, 0)
                    for part in piece.parts:
                        high[_there(part)] += kept[part.row : part.row + part.count]
                    placed.append((there, high))
            if placed:
                found[public] = _trimmed(*_combined(placed))
        return found

    def to_ours(self, file: AdapterFile, *, separate: bool = False) -> Adapters:
        """Return the adapters of a file as those of our layers.

        With ``separate``, projections get a matrix A each even if the file needs only one for all.

        Raises:
            CheckpointError: a layer has no place in the network, or another shape, or its scale
                cannot be that of the run.
        """
        known = flattened(self.pieces)
        cut: dict[str, dict[int, LowRank]] = {}
        for name, adapter in file.layers.items():
            public = known.get(name)
            if public is None:
                raise CheckpointError(_no_place(self, file, name))
            shape = self.mapped.shapes[f"{public}.weight"]
            if (len(adapter.b), adapter.a.size(1)) != shape:
                theirs = [len(adapter.b), adapter.a.size(1)]
                raise CheckpointError(
                    f"{file.path} holds an adapter of `{name}` with shape {theirs}, but this "
                    f"{self.conversion.title} has {list(shape)}; give adapters of a model of this "
                    "size."
                )
            for piece, own in self._cut(self.pieces[public], adapter):
                cut.setdefault(piece.layer, {})[piece.projection] = own
        return _joined(self, file, cut, separate=separate)

    def _cut(self, pieces: Sequence[Piece], adapter: LowRank) -> Iterator[tuple[Piece, LowRank]]:
        """Yield what each piece has of a public layer's adapter, B in our order of rows."""
        found = list[tuple[Piece, LowRank]]()
        for piece in pieces:
            outputs, inputs = self.shape(piece.layer)
            column = piece.parts[0].column
            a = adapter.a[:, column : column + inputs]
            b = adapter.b.new_zeros(outputs, adapter.rank)
            for part in piece.parts:
                b[part.row : part.row + part.count] = adapter.b[_there(part)]
            b = torch.where(piece.rows.unsqueeze(1), b, 0)
            found.append((piece, LowRank(a, b, adapter.scale)))
        blocks = _blocks([own for _, own in found])
        for (piece, own), block in zip(found, blocks, strict=True):
            yield piece, LowRank(own.a[block], own.b[:, block], own.scale)


def _rows_of(parts: Iterable[Part], count: int) -> Tensor:
    rows = torch.zeros(count, dtype=torch.bool)
    for part in parts:
        rows[part.row : part.row + part.count] = True
    return rows


def _there(part: Part) -> slice:
    """Return the rows of a public layer that are a part of ours."""
    return slice(part.start, part.start + (part.count - 1) * part.step + 1, part.step)


def _combined(placed: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return adapters of the same layer as one; those with the same A or B need no higher rank."""
    merged = list[tuple[Tensor, Tensor]]()
    for a, b in placed:
        for index, (other_a, other_b) in enumerate(merged):
            if torch.equal(a, other_a):
                merged[index] = a, b + other_b
                break
            apart = not (a.bool().any(0) & other_a.bool().any(0)).any()
            if torch.equal(b, other_b) and apart:
                merged[index] = a + other_a, b
                break
        else:
            merged.append((a, b))
    return torch.cat([a for a, _ in merged]), torch.cat([b for _, b in merged], dim=1)


def _active(a: Tensor, b: Tensor) -> Tensor:
    """Return for each of the r products whether it changes anything."""
    return a.bool().any(1) & b.bool().any(0)


def _trimmed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return an adapter without the last products of zeros, with which an import fills up ranks."""
    used = a.bool().any(1) | b.bool().any(0)
    rank = int(used.nonzero().max()) + 1 if used.any() else 1
    return a[:rank], b[:, :rank]


def _blocks(adapters: Sequence[LowRank]) -> list[slice]:
    """Return the products that each of several adapters, cut from one, is to keep.

    Each keeps its own block if A and B are put together of blocks of the same rank, else all.
    """
    rank = adapters[0].rank
    active = [_active(each.a, each.b) for each in adapters]
    for count in range(len(adapters), 1, -1):
        width = rank // count
        if rank % count or not all(each.any() for each in active):
            continue
        owners = [each.view(count, width).any(1).nonzero().flatten().tolist() for each in active]
        if all(len(each) == 1 for each in owners) and {x for (x,) in owners} == {*range(count)}:
            return [slice(x * width, (x + 1) * width) for (x,) in owners]
    return [slice(None)] * len(adapters)


def _no_place(places: AdapterMap, file: AdapterFile, name: str) -> str:
    """Return a message for an adapter of a file on a layer that takes none."""
    title = places.conversion.title
    outer = flattened(
        tensor.removesuffix(".weight")
        for form in places.conversion.forms
        for tensor in Mapped.of(
            form, places.sizes, places.conversion.parameters(places.sizes)
        ).shapes
        if tensor.endswith(".weight")
    )
    if name in outer:
        return (
            f"{file.path} holds an adapter of `{name}`, which is none of the linear layers in the "
            f"blocks of {title}, on which adapters are trained; merge it into the weights first."
        )
    return (
        f"{file.path} holds an adapter of `{name}`, which this {title} does not have; give "
        "adapters of this model."
    )


@dataclass(frozen=True)
class Adapters:
    """Adapters of our layers, all of the same rank and scale.

    Attributes:
        alpha: their ``--lora-alpha``.
        separate: whether layers that join projections have a matrix A for each.
        targets: names for ``--lora-target-modules`` of the layers that have some.
        matrices: A and B by name of our layer. A projection that the file lacks has zeros in B.
        given: by name of our layer, for each row of A whether the file has it.
        missing: number of projections of these layers and blocks that the file lacks.
    """

    rank: int
    alpha: float
    separate: bool
    targets: list[str]
    matrices: Pairs
    given: Mapping[str, Tensor]
    missing: int


def _joined(
    places: AdapterMap,
    file: AdapterFile,
    cut: Mapping[str, Mapping[int, LowRank]],
    *,
    separate: bool,
) -> Adapters:
    """Return adapters of our layers, of which ``cut`` has the projections by layer and index."""
    every = [own for pieces in cut.values() for own in pieces.values()]
    rank = max(own.rank for own in every)
    scale = Counter(own.scale for own in every).most_common(1)[0][0]
    separate = separate or any(
        not torch.equal(own.a, first.a)
        for pieces in cut.values()
        for first in [next(iter(pieces.values()))]
        for own in pieces.values()
    )
    matrices = dict[str, tuple[Tensor, Tensor]]()
    given = dict[str, Tensor]()
    targets = shortest_targets([*cut], places.layers)
    for layer, pieces in cut.items():
        outputs, inputs = places.shape(layer)
        count = len(places.projections(layer)) if separate else 1
        dtype = next(iter(pieces.values())).a.dtype
        a = torch.zeros(count * rank, inputs, dtype=dtype)
        b = torch.zeros(outputs, rank, dtype=dtype)
        rows = torch.zeros(count * rank, dtype=torch.bool)
        for index, own in pieces.items():
            start = index * rank if separate else 0
            a[start : start + own.rank] = own.a
            b[:, : own.rank] += _scaled(own, scale, file, layer)
            rows[start : start + rank] = True
        matrices[layer] = a, b
        given[layer] = rows
    adapted = [x for x in places.layers if any(is_named(x, target) for target in targets)]
    wanted = sum(len(places.projections(x)) for x in adapted)
    alpha = scale * rank
    return Adapters(
        rank, round(alpha, 9), separate, targets, matrices, given,
        wanted - sum(map(len, cut.values())),
    )  # fmt: skip


def _scaled(own: LowRank, scale: float, file: AdapterFile, layer: str) -> Tensor:
    """Return B multiplied so that the run's ``scale`` gives the adapter's; refuse if it rounds."""
    if own.scale == scale:
        return own.b
    factor = own.scale / scale
    b = own.b * factor
    if not torch.equal(b / factor, own.b) or not torch.equal(b.double(), own.b.double() * factor):
        raise CheckpointError(
            f"{file.path} scales the adapter of `{layer}` by {own.scale:g}, but most others by "
            f"{scale:g}, and the factor {factor:g} between them is no power of two, so that it "
            "would be rounded; give adapters of one scale."
        )
    return b


def shortest_targets(layers: Iterable[str], every: Iterable[str]) -> list[str]:
    """Return names of kinds of ``layers`` that name none of the kinds which only ``every`` has."""
    kinds = dict.fromkeys(map(kind_of, layers))
    others = {kind_of(layer) for layer in every} - kinds.keys()
    found = dict[str, None]()
    for kind in kinds:
        words = kind.split(".")
        endings = [".".join(words[-count:]) for count in range(1, len(words) + 1)]
        clear = (x for x in endings if not any(is_named(other, x) for other in others))
        found[next(clear, kind)] = None
    return list(found)
