"""Relates our weights to the tensors of a family of Hugging Face models, in a table of rows.

Along its first axis, each of our parameters is made of runs of rows, where a run comes from one
Hugging Face tensor. A `Part` describes such a run in all layers, a `Run` in one of them. A model's
`Table`, which is made of its family's `Weights`, lists the parts of each parameter. It tells which
slices of the Hugging Face tensors a slice of our parameter needs, and for an export the reverse.

Two of our weights are fused. ``linear_qkv`` holds, for each of g query groups, the rows of its
query heads, then of its key, then of its value: ``[g, n/g + 2, d, h]``, flattened to ``[rows, h]``
(Megatron's order), for n heads of size d and hidden size h. The gates of the heads, if any, follow
the query heads: ``[g, 2 n/g + 2, d, h]``. ``linear_fc1`` of a gated MLP holds
the rows of the gate, then the rows of the other projection: ``[2 * ffn, h]``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ext.config.model import ModelConfig

Index = tuple[int | slice, ...]
"""The index of a block of a tensor, one entry for each axis."""
Shapes = dict[str, tuple[int, ...]]
"""The shapes of tensors, by name."""


def widen(shapes: Shapes, name: str, shape: tuple[int, ...]) -> None:
    """Enlarge, or add, the shape of tensor ``name`` to hold at least ``shape`` along each axis."""
    shapes[name] = tuple(map(max, shapes.get(name, shape), shape))


@dataclass(frozen=True)
class Part:
    """Consecutive rows of our parameter that come from one Hugging Face tensor.

    Attributes:
        tensor: name of the tensor, with ``{layer}`` and ``{expert}`` in place of their numbers. The
            number of an MLP that is a layer of its own is ``{mlp_layer}``.
        count: number of rows; None divides the rows of the parameter equally among its parts.
        start: index of the first of these rows in the tensor.
        step: distance between neighbouring rows in the tensor.
        transposed: whether the tensor is stored ``[in, out]``, so that its columns are our rows.
        stacked: whether the tensor holds all experts along its first axis.
        scalar: whether the tensor is a number without an axis, and our parameter has one row.
        ones: the axes of size 1 that the tensor has and our parameter lacks, in ascending order.
    """

    tensor: str
    count: int | None = None
    start: int = 0
    step: int = 1
    transposed: bool = False
    stacked: bool = False
    scalar: bool = False
    ones: tuple[int, ...] = ()


Parts = Sequence[Part]


@dataclass(frozen=True)
class Run:
    """A `Part` of one particular parameter, with layer and expert numbers filled in.

    The parameter's rows ``row`` to ``row + count - 1`` are rows of ``tensor``: the first of them is
    row ``start``, and each next one is ``step`` rows further on. If ``expert`` is not None, it is
    an index along the first axis of ``tensor``, which stacks all experts. If ``scalar``, ``tensor``
    has no axis. It has the axes ``ones`` of size 1 beside ours.
    """

    row: int
    count: int
    tensor: str
    start: int
    step: int
    transposed: bool
    expert: int | None
    scalar: bool = False
    ones: tuple[int, ...] = ()

    def shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """Return the smallest shape that the Hugging Face tensor must have to hold this run.

        ``ours`` is the shape of our parameter.
        """
        if self.scalar:
            return ()
        rows = self.start + (self.count - 1) * self.step + 1
        plane = (*ours[1:], rows) if self.transposed else (rows, *ours[1:])
        for axis in self.ones:
            plane = (*plane[:axis], 1, *plane[axis:])
        return plane if self.expert is None else (self.expert + 1, *plane)

    def overlap(self, offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, Index] | None:
        """Return where this run and a block of our parameter overlap; None if they do not.

        The block begins at the index ``offset`` of the parameter and has the shape ``shape``.
        Return the overlap twice: as a slice of the block's rows, and as an index into the Hugging
        Face tensor.
        """
        low = max(self.row, offset[0])
        high = min(self.row + self.count, offset[0] + shape[0])
        if low >= high:
            return None
        first = self.start + (low - self.row) * self.step
        rows = slice(first, first + (high - low - 1) * self.step + 1, self.step)
        columns = [slice(low, low + size) for low, size in zip(offset[1:], shape[1:], strict=True)]
        plane: Index = (*columns, rows) if self.transposed else (rows, *columns)
        for axis in self.ones:
            plane = (*plane[:axis], 0, *plane[axis:])
        own = slice(low - offset[0], high - offset[0])
        if self.scalar:
            return own, ()
        return own, plane if self.expert is None else (self.expert, *plane)


@dataclass(frozen=True)
class Table:
    """Maps each parameter of our model to its parts in the Hugging Face tensors.

    Attributes:
        outer: parts of the parameters outside of layers, by our name.
        layer: parts of the parameters of a decoder layer, by our name within the layer.
        depth: parts of the parameters of an MTP depth, except those of its transformer layer.
            transformers numbers depths as layers after the decoder's.
        copies: names of tensors that are copies, each with the name of the original. Copies are
            written, but not read.
        exact: suffixes of the names of tensors that stay in float32, whatever the model's dtype.
        unused: beginnings of the names of tensors that have no place in our model.
        layers: the numbers in the files of the mixer and of the MLP of each decoder layer, if they
            are layers of their own there.
        depth_layer: parts of the parameters of the transformer layer of an MTP depth, if depths
            have paths and numbers of their own.
    """

    outer: Mapping[str, Parts]
    layer: Mapping[str, Parts]
    depth: Mapping[str, Parts] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    exact: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    layers: Sequence[tuple[int, int]] = ()
    depth_layer: Mapping[str, Parts] = field(default_factory=dict)

    @property
    def path_of_depths(self) -> str:
        """Return the beginning of the names of tensors of MTP depths that have a path of their own.

        It is "" if depths are numbered as layers after the decoder's.
        """
        for parts in self.depth_layer.values():
            return parts[0].tensor.partition(".")[0] + "."
        return ""

    def is_exact(self, tensor: str) -> bool:
        """Tell whether a tensor stays in float32, whatever the model's dtype."""
        return tensor.endswith(self.exact) if self.exact else False

    def names_in(self, names: Collection[str]) -> int:
        """Return how many of the tensors ``names`` hold parts of parameters."""
        known = {
            part.tensor.format(layer="*", mlp_layer="*", expert="*")
            for table in (self.outer, self.layer, self.depth, self.depth_layer)
            for parts in table.values()
            for part in parts
        }
        return sum(_NUMBER.sub("*", name) in known for name in names)

    def end_of_decoder(self, num_layers: int) -> int:
        """Return how many layers the files have of a decoder with ``num_layers`` layers."""
        return self.layers[-1][1] + 1 if self.layers else num_layers

    def numbers(self, layer: int) -> dict[str, int]:
        """Return the numbers in the files of the mixer and of the MLP of a layer, for templates."""
        mixer, mlp = self.layers[layer] if self.layers else (layer, layer)
        return {"layer": mixer, "mlp_layer": mlp}

    def turns(self, shapes: Mapping[str, Sequence[int]], hidden_size: int) -> bool:
        """Tell whether the tensors of all experts are stored as this table says: turned or not.

        ``shapes`` has the shapes of a folder's tensors by name. If there are no such tensors, they
        are as the table says.
        """
        for part in self.layer.get("mlp.experts.experts.linear_fc2.weight", ()):
            pattern = re.escape(part.tensor).replace(r"\{layer\}", r"\d+")
            stored = next((x for name, x in shapes.items() if re.fullmatch(pattern, name)), None)
            if part.stacked and stored is not None:
                return stored[2 if part.transposed else 1] == hidden_size
        return True

    def without_place(self, tensors: Iterable[str]) -> set[str]:
        """Return the names in ``tensors`` of those that have no place in our model."""
        return {name for name in tensors if self.unused and name.startswith(self.unused)}

    def runs(self, name: str, rows: int, num_layers: int) -> list[Run] | None:
        """Return the runs that make up our parameter ``name``, which has ``rows`` rows.

        Return None if the family has no such parameter. ``num_layers`` is the number of decoder
        layers, after which Hugging Face numbers the MTP depths.
        """
        numbers: dict[str, int] = {}
        parts = self.outer.get(name)
        if parts is None:
            own = parse(name)
            if own is None:
                return None
            within = self.depth_layer or self.layer
            tables = {"decoder": self.layer, "depth": self.depth, "depth's layer": within}
            parts = tables[own.block].get(own.rest)
            # transformers numbers the depths of multi-token prediction after the decoder's layers.
            apart = own.block == "decoder" or self.depth_layer
            if self.layers and not apart:
                return None
            layer = own.layer + (0 if apart else num_layers)
            numbers = {**self.numbers(layer), "expert": own.expert or 0}
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
            place = part.start, part.step, part.transposed
            runs.append(Run(row, count, tensor, *place, index, part.scalar, part.ones))
            row += count
        return runs


@dataclass(frozen=True)
class OurName:
    """The components of the name that a layer's parameter has in `sharded_state_dict`.

    Attributes:
        block: "decoder", "depth", or "depth's layer" for the transformer layer in an MTP depth.
        layer: index of the layer or depth.
        rest: the name within the layer.
        expert: index of the expert; None outside of experts.
    """

    block: str
    layer: int
    rest: str
    expert: int | None


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_NAME = re.compile(
    r"(?P<block>decoder|mtp)\.layers\.(?:(?P<number>\d+)\.)?(?P<inner>transformer_layer\.)?"
    r"(?P<rest>[^\[]+)(?P<indices>(?:\[\d+\])*)$"
)


def parse(name: str) -> OurName | None:
    """Parse a parameter's name in `sharded_state_dict`; return None for one outside of layers.

    If the layers of the model differ in kind, the index of the layer follows ``layers.`` in the
    name. Otherwise the name ends with indices in brackets, of which the first is the layer's.
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


def grouped_qkv(model: ModelConfig, query: str, key: str, value: str) -> Parts:
    """Return the parts of ``linear_qkv`` from separate tensors of queries, keys and values."""
    return _qkv(model, ((query, 0), (key, 0), (value, 0)))


def gated_qkv(model: ModelConfig, query: str, key: str, value: str) -> Parts:
    """Return the parts of ``linear_qkv`` with gates of the heads, from three tensors.

    The rows of each head's query, and then those of its gate, follow one another in ``query``.
    """
    heads, groups, size = head_sizes(model)
    share = heads // groups
    parts: list[Part] = []
    for group in range(groups):
        own = range(group * share, (group + 1) * share)
        parts += [Part(query, size, 2 * head * size) for head in own]
        parts += [Part(query, size, (2 * head + 1) * size) for head in own]
        parts += [Part(tensor, size, group * size) for tensor in (key, value)]
    return tuple(parts)


def fused_qkv(model: ModelConfig, tensor: str) -> Parts:
    """Return the parts of ``linear_qkv`` from one tensor: all queries, then keys, then values."""
    heads, groups, size = head_sizes(model)
    starts = (0, heads * size, (heads + groups) * size)
    return _qkv(model, [(tensor, start) for start in starts])


def head_sizes(model: ModelConfig) -> tuple[int, int, int]:
    """Return (number of heads n, number of query groups g, head size d)."""
    heads = model.num_attention_heads
    size = model.kv_channels
    assert heads is not None and size is not None
    return heads, model.num_query_groups or heads, size


def qkv_with_gate(model: ModelConfig, query: str, gate: str, key: str, value: str) -> Parts:
    """Return the parts of ``linear_qkv`` with gates of the heads, from four tensors."""
    return _qkv(model, [(tensor, 0) for tensor in (query, gate, key, value)])


def _qkv(model: ModelConfig, places: Sequence[tuple[str, int]]) -> Parts:
    """Return the parts from the tensors, each with its first row, of queries, keys and values.

    Those of gates may follow the queries'.
    """
    heads, groups, size = head_sizes(model)
    counts = (*(heads // groups * size for _ in places[:-2]), size, size)
    return tuple(
        Part(tensor, count, start + group * count)
        for group in range(groups)
        for (tensor, start), count in zip(places, counts, strict=True)
    )
