"""The weights of a family of Hugging Face models as a table of rows.

Each of our parameters is, along its first axis, a sequence of runs of rows of tensors of
transformers. A `Part` names one run. A family's `Table` lists the parts of each parameter, so the
slices of their files that any slice of ours needs follow from it, and so does the way back.

Two of our weights are fused. ``linear_qkv`` holds, for each of g query groups, the rows of its
query heads, then of its key, then of its value: ``[g, n/g + 2, d, h]``, flattened to ``[rows, h]``
(Megatron's order). ``linear_fc1`` of a gated MLP holds the rows of the gate, then those of the
other projection: ``[2 * ffn, h]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ext.config.model import ModelConfig

Index = tuple[int | slice, ...]
"""The index of a block of a tensor, one entry for each axis."""
Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""


def widen(shapes: Shapes, name: str, shape: tuple[int, ...]) -> None:
    """Let the shape of a tensor be at least this one along each axis."""
    shapes[name] = tuple(map(max, shapes.get(name, shape), shape))


@dataclass(frozen=True)
class Part:
    """A run of rows of one tensor of transformers, which follow each other in our parameter.

    Attributes:
        tensor: name of the tensor, with ``{layer}`` and ``{expert}`` for the numbers of these.
        count: number of rows; None gives the parts of a parameter equal shares of its rows.
        start: the first row in that tensor.
        step: distance between neighbouring rows in that tensor.
        transposed: that tensor is stored ``[in, out]``, so its columns are our rows.
        stacked: that tensor holds all experts along its first axis.
    """

    tensor: str
    count: int | None = None
    start: int = 0
    step: int = 1
    transposed: bool = False
    stacked: bool = False


Parts = Sequence[Part]


@dataclass(frozen=True)
class Run:
    """A `Part` of one parameter: rows from ``row`` on are those of ``tensor`` from ``start`` on."""

    row: int
    count: int
    tensor: str
    start: int
    step: int
    transposed: bool
    expert: int | None

    def shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """Return the least shape of the tensor, given the shape of our parameter."""
        rows = self.start + (self.count - 1) * self.step + 1
        plane = (*ours[1:], rows) if self.transposed else (rows, *ours[1:])
        return plane if self.expert is None else (self.expert + 1, *plane)

    def overlap(self, offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, Index] | None:
        """Return where a block of our parameter lies in the tensor; None if it has none of the run.

        The block begins at ``offset`` and has the given shape. The first result are its rows that
        belong to the run, the second is the index of their values in the tensor.
        """
        low = max(self.row, offset[0])
        high = min(self.row + self.count, offset[0] + shape[0])
        if low >= high:
            return None
        first = self.start + (low - self.row) * self.step
        rows = slice(first, first + (high - low - 1) * self.step + 1, self.step)
        columns = [slice(at, at + size) for at, size in zip(offset[1:], shape[1:], strict=True)]
        plane = (*columns, rows) if self.transposed else (rows, *columns)
        own = slice(low - offset[0], high - offset[0])
        return own, plane if self.expert is None else (self.expert, *plane)


@dataclass(frozen=True)
class Table:
    """The parts of all parameters of a model.

    Attributes:
        outer: parts of parameters outside of layers, by our name.
        layer: parts of the parameters of a decoder layer, by the rest of our name.
        depth: parts of the parameters of a depth of multi-token prediction beside its layer, which
            follows the decoder's layers in transformers' numbering.
        copies: tensors that repeat other tensors, by name; they are written, and need not be read.
        exact: ends of the names of tensors that stay in float32, whatever the model's dtype.
    """

    outer: Mapping[str, Parts]
    layer: Mapping[str, Parts]
    depth: Mapping[str, Parts] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    exact: tuple[str, ...] = ()

    def is_exact(self, tensor: str) -> bool:
        """Return whether a tensor of transformers stays in float32."""
        return tensor.endswith(self.exact) if self.exact else False

    def runs(self, name: str, rows: int, num_layers: int) -> list[Run] | None:
        """Return the runs of one of our parameters with ``rows`` rows; None if it has no place.

        ``name`` is the name of its shards (`layers.initialization.Shard`).
        """
        numbers: dict[str, int] = {}
        parts = self.outer.get(name)
        if parts is None:
            own = parse(name)
            if own is None:
                return None
            tables = {"decoder": self.layer, "depth": self.depth, "depth's layer": self.layer}
            parts = tables[own.block].get(own.rest)
            layer = own.layer + (0 if own.block == "decoder" else num_layers)
            numbers = {"layer": layer, "expert": own.expert or 0}
        if parts is None:
            return None
        expert = numbers.get("expert")
        share = rows // len(parts)
        runs = []
        row = 0
        for part in parts:
            count = share if part.count is None else part.count
            tensor = part.tensor.format(**numbers)
            index = expert if part.stacked else None
            runs.append(Run(row, count, tensor, part.start, part.step, part.transposed, index))
            row += count
        return runs


@dataclass(frozen=True)
class OurName:
    """The name of a parameter of a layer, in its parts."""

    block: str
    layer: int
    rest: str
    expert: int | None


_NAME = re.compile(
    r"(?P<block>decoder|mtp)\.layers\.(?:(?P<number>\d+)\.)?(?P<inner>transformer_layer\.)?"
    r"(?P<rest>[^\[]+)(?P<indices>(?:\[\d+\])*)$"
)


def parse(name: str) -> OurName | None:
    """Return the parts of the name of a layer's shards; None if it belongs to no layer.

    The layer's number stands within the name if layers differ, else it is the first index.
    """
    match = _NAME.match(name)
    if match is None:
        return None
    numbers = [int(index) for index in re.findall(r"\d+", match["indices"])]
    if match["number"] is not None:
        numbers.insert(0, int(match["number"]))
    block = match["block"]
    if block == "mtp":
        block = "depth's layer" if match["inner"] else "depth"
    return OurName(block, numbers[0], match["rest"], numbers[1] if len(numbers) > 1 else None)


def whole(tensor: str, *, transposed: bool = False) -> Parts:
    """Return the parts of a parameter that equals one tensor, or its transpose."""
    return (Part(tensor, transposed=transposed),)


def joined(*tensors: str) -> Parts:
    """Return the parts of a parameter that joins tensors with equal numbers of rows."""
    return tuple(Part(tensor) for tensor in tensors)


def grouped_qkv(model: ModelConfig, query: str, key: str, value: str) -> Parts:
    """Return the parts of ``linear_qkv``, given the tensors of queries, keys and values."""
    return _qkv(model, ((query, 0), (key, 0), (value, 0)))


def fused_qkv(model: ModelConfig, tensor: str, *, transposed: bool = False) -> Parts:
    """Return the parts of ``linear_qkv``, given one tensor of all queries, all keys, all values."""
    heads, groups, size = head_sizes(model)
    starts = (0, heads * size, (heads + groups) * size)
    return _qkv(model, [(tensor, start) for start in starts], transposed=transposed)


def head_sizes(model: ModelConfig) -> tuple[int, int, int]:
    """Return the number of heads n, of query groups g, and the head size d."""
    heads = model.num_attention_heads
    size = model.kv_channels
    assert heads is not None and size is not None
    return heads, model.num_query_groups or heads, size


def _qkv(
    model: ModelConfig, places: Iterable[tuple[str, int]], *, transposed: bool = False
) -> Parts:
    heads, groups, size = head_sizes(model)
    counts = (heads // groups * size, size, size)
    return tuple(
        Part(tensor, count, start + group * count, transposed=transposed)
        for group in range(groups)
        for (tensor, start), count in zip(places, counts, strict=True)
    )
