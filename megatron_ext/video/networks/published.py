"""The data by which a network's published weights are read and written.

A network that has published weights names a `Conversion` in its `VideoNetwork.conversion`, and
gives only data and pure functions in it. All else is generic: `video.convert` finds the form of a
folder or file, reads it (each rank its own slices), imports it as a checkpoint, and exports a
checkpoint in any form. To add a form, write down:

1. the names of our parameters with their shapes, `Conversion.parameters`, for any sizes;
2. for each published form a `Form`: its classes in config.json, how config.json becomes sizes and
   back, how the shapes of a single file become sizes, and `Form.table`: by our parameter's name,
   the public tensors that hold its values, as a `Rule`;
3. the flags of a run whose network has these sizes, `Conversion.sections`.

A `Rule` is built by the functions below (n heads of size d, hidden size h):

    whole("proj_out.weight")                     one tensor, as it is
    whole("patch_embedding.weight", shape=...)   one tensor of another shape, the values in order
    joined("a.weight", "b.weight")               the rows of several tensors, one after another
    by_head(("q.weight", "k.weight"), d)         rows of a head from each tensor, head after head
    unfused_by_head("qkv.weight", 3, n, d)       the same, from one tensor [q rows; k rows; v rows]
    rows_from("linear1.weight", start)           as many rows as ours has, from row `start` on
    columns_from("linear2.weight", start)        as many columns as ours has, from column `start` on
    columns_from("in.weight", start, shape=...)  the same, from a convolution's weight of this shape
    reordered("norm_out.linear.weight", (1, 0))  equal blocks of rows in another order
    transposed_rows("head.weight", c, shape=..)  row (i, j) of ours, of c x r, is row (j, i) there

A rule serves a weight and its bias alike, because only rows move, except with `columns_from`. If
none of them fits, write a function of the number of our rows that returns `Part`s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.video.networks.network import Sections

CLASS = "_class_name"
"""The entry that names the class in a video network's config.json; language models have none."""

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""The shape of each tensor by name."""


@dataclass(frozen=True)
class Part:
    """Consecutive rows of one of our parameters that come from one public tensor.

    Both are seen as matrices: a vector has rows of one value, and further axes are flattened into
    the columns. Our rows ``row`` to ``row + count - 1`` are the rows ``start``, ``start + step``
    and so on of the tensor, from its column ``column`` on.

    Attributes:
        tensor: name of the public tensor.
        shape: shape of the public tensor, if it is not a matrix with our parameter's columns (or a
            vector, for a vector); the rows are counted after its values are seen as such a matrix.
        width: number of columns of that matrix, if it is not our parameter's.
    """

    tensor: str
    row: int
    count: int
    start: int = 0
    step: int = 1
    column: int = 0
    shape: Shape | None = None
    width: int | None = None


Rule = Callable[[int], Sequence[Part]]
"""Takes the number of rows of our parameter, and returns the parts that make it up."""


def whole(tensor: str, *, shape: Shape | None = None) -> Rule:
    """Return the rule of a parameter that is one public tensor, perhaps of another ``shape``."""
    return lambda rows: (Part(tensor, 0, rows, shape=shape),)


def joined(*tensors: str) -> Rule:
    """Return the rule of a parameter that joins the rows of ``tensors``, all of equally many."""

    def parts(rows: int) -> list[Part]:
        count = rows // len(tensors)
        return [Part(tensor, i * count, count) for i, tensor in enumerate(tensors)]

    return parts


def by_head(tensors: Sequence[str], head_dim: int) -> Rule:
    """Return the rule of a fused projection of several public ones, ``[n, p, d]`` rows.

    For each head follow its ``head_dim`` rows in each of the p ``tensors``.
    """

    def parts(rows: int) -> list[Part]:
        stride = len(tensors) * head_dim
        return [
            Part(tensor, head * stride + i * head_dim, head_dim, head * head_dim)
            for head in range(rows // stride)
            for i, tensor in enumerate(tensors)
        ]

    return parts


def unfused_by_head(tensor: str, num_projections: int, num_heads: int, head_dim: int) -> Rule:
    """Return the rule of a fused projection that is also fused in public, but in another order.

    Ours has ``[n, p, d]`` rows, the public tensor ``[p, n, d]`` rows, and perhaps more after them.
    """

    def parts(rows: int) -> list[Part]:
        width = num_heads * head_dim
        return [
            Part(
                tensor,
                (head * num_projections + i) * head_dim,
                head_dim,
                i * width + head * head_dim,
            )
            for head in range(num_heads)
            for i in range(num_projections)
        ]

    return parts


def rows_from(tensor: str, start: int) -> Rule:
    """Return the rule of a parameter that is rows of a public tensor, from ``start`` on."""
    return lambda rows: (Part(tensor, 0, rows, start),)


def columns_from(tensor: str, start: int, *, shape: Shape | None = None) -> Rule:
    """Return the rule of a parameter that is columns of a public matrix, from ``start`` on.

    A tensor with more axes, of this ``shape``, has the columns that all axes but the first make.
    """
    width = None if shape is None else math.prod(shape[1:])
    return lambda rows: (Part(tensor, 0, rows, column=start, shape=shape, width=width),)


def reordered(tensor: str, order: Sequence[int]) -> Rule:
    """Return the rule of a parameter with the blocks of rows of a public tensor in another order.

    ``order[i]`` is the index of the public block that is our block i; ``(1, 0)`` swaps two halves,
    such as shift and scale.
    """

    def parts(rows: int) -> list[Part]:
        count = rows // len(order)
        return [Part(tensor, i * count, count, block * count) for i, block in enumerate(order)]

    return parts


def transposed_rows(tensor: str, outer: int, *, shape: Shape | None = None) -> Rule:
    """Return the rule of a parameter whose rows ``[outer, inner]`` are ``[inner, outer]`` there."""

    def parts(rows: int) -> list[Part]:
        inner = rows // outer
        return [Part(tensor, i * inner, inner, i, outer, shape=shape) for i in range(outer)]

    return parts


def expanded(name: str) -> tuple[str, ...]:
    """Return the names that braces stand for: ``to_{q,k}`` for ``to_q`` and ``to_k``."""
    before, _, rest = name.partition("{")
    parts, _, after = rest.partition("}")
    return tuple(f"{before}{part}{after}" for part in parts.split(","))


def shape_of_parts(parts: Mapping[str, Sequence[tuple[Part, Shape]]]) -> dict[str, Shape]:
    """Return the shape of each public tensor.

    ``parts`` has, by the tensor's name, each `Part` that comes from it, with our parameter's shape.
    """
    shapes = dict[str, Shape]()
    for tensor, uses in parts.items():
        given = [part.shape for part, _ in uses if part.shape is not None]
        rows = max(part.start + (part.count - 1) * part.step + 1 for part, _ in uses)
        width = max(part.column + math.prod(ours[1:]) for part, ours in uses)
        is_vector = all(len(ours) == 1 for _, ours in uses)
        shapes[tensor] = given[0] if given else (rows,) if is_vector else (rows, width)
    return shapes


def seen_as(shape: Sequence[int], part: Part, ours: Sequence[int]) -> Shape:
    """Return the shape of a public tensor as the matrix, or vector, whose rows a `Part` counts.

    ``ours`` is the shape of our parameter.
    """
    if part.shape is None:
        return tuple(shape)
    width = part.width or math.prod(ours[1:])
    rows = math.prod(shape) // width
    return (rows,) if len(ours) == 1 else (rows, width)


@dataclass(frozen=True, kw_only=True)
class Form:
    """One of the forms in which a network's weights are published.

    Attributes:
        name: the form's name, a value of ``--naming``, such as "diffusers".
        classes: values of ``_class_name`` in config.json. A form that is published in single files
            alone, without config.json, has none, and neither ``read_config`` nor ``write_config``.
        knows: a function of a model's tensor names that returns whether they are this form's. The
            first form of a conversion that knows them is taken.
        read_config: a function of ``(content, path)``, config.json's content and place; it returns
            the sizes, and raises CheckpointError for what the network does not support.
        read_shapes: a function of ``(shapes, path)`` that returns the sizes of a model without
            config.json, from its tensors' shapes by name.
        completed: a function of ``(sizes, shapes)`` that returns the sizes of config.json with
            those that only the shapes of the tensors tell; None if there are none.
        write_config: a function of sizes that returns the content of config.json, with the entry
            ``_class_name``.
        table: a function of sizes that returns the `Rule` of each of our parameters by name.
        ignored: pattern of the names of tensors that are no weights, such as buffers.
        stem: beginning of the names of the files of weights in a folder.
    """

    name: str
    classes: Sequence[str] = ()
    knows: Callable[[Collection[str]], bool]
    read_config: Callable[[Mapping[str, Any], Path], Any] | None = None
    read_shapes: Callable[[Shapes, Path], Any]
    completed: Callable[[Any, Shapes], Any] | None = None
    write_config: Callable[[Any], dict[str, Any]] | None = None
    table: Callable[[Any], Mapping[str, Rule]]
    ignored: re.Pattern[str] | None = None
    stem: str = "diffusion_pytorch_model"


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversion:
    """All that is needed to read and write the published weights of a network.

    Attributes:
        title: the name of the published models, such as "Wan 2.1 text to video".
        forms: the published forms. If ``--naming`` does not choose, an export takes the first for
            a folder, and the last, which has ComfyUI's names, for a single file.
        parameters: a function of sizes that returns the unsharded shape of each of our parameters
            by its name in a checkpoint, in module order.
        kinds: a function of sizes that returns the kinds of run which can train a network of these
            sizes: values of ``--video-model``, or `STREAMING`. The first is the kind of the
            checkpoint that an import writes.
        sections: a function of ``(sizes, kind)`` that returns the flags, ``{section: {field:
            value}}``, of a run of this kind whose network has these sizes. If there is no such
            run, it raises CheckpointError.
        adapted: pattern that matches the names of our layers that can have LoRA adapters. Layers
            of the first form get the adapters.
        sampling: a function of ``(sizes, index)`` that returns the values of flags, by field, with
            which the published models sample: size, frames and rate of clips, the words in
            captions, and the scales of guidance. ``index`` is the content of the pipeline's
            model_index.json, {} without a pipeline.
        refused: values of ``_class_name`` of related models that are not supported, with what they
            are, such as "Wan VACE, which has control blocks"; so a message can name them.
        adds: fields of the sizes by which a run may add a branch that the weights lack, such as an
            input for reference frames. The branch's parameters, which `mark_new_branch` marks, keep
            their initial values.
        remedies: what to do, by field of the sizes, if a run builds a network of another size than
            its weights have.
    """

    title: str
    forms: Sequence[Form]
    parameters: Callable[[Any], Shapes]
    kinds: Callable[[Any], Sequence[str]]
    sections: Callable[[Any, str], Sections]
    sampling: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] = lambda sizes, index: {}
    adapted: re.Pattern[str] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    adds: frozenset[str] = field(default_factory=frozenset)
    remedies: Mapping[str, str] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the values of ``_class_name`` of all forms."""
        return tuple(name for form in self.forms for name in form.classes)

    @property
    def namings(self) -> tuple[str, ...]:
        """Return the names of the forms."""
        return tuple(form.name for form in self.forms)

    def form(self, naming: str | None) -> Form:
        """Return the form of this name; None stands for the first."""
        return next(form for form in self.forms if naming in (None, form.name))


@dataclass(frozen=True)
class Mapped:
    """A form's table for a model of certain sizes: rules applied to our parameters' shapes.

    Attributes:
        parameters: the shape of each of our parameters that the form has.
        parts: the parts of each of them.
        shapes: the shape of each public tensor.
        uses: by public tensor, each part that comes from it, with our parameter's name.
    """

    parameters: Shapes
    parts: Mapping[str, Sequence[Part]]
    shapes: Shapes
    uses: Mapping[str, Sequence[tuple[str, Part]]]

    @classmethod
    def of(cls, form: Form, sizes: Any, parameters: Shapes) -> Mapped:
        """Apply a form's rules to ``parameters``, the shapes of our parameters by name."""
        table = form.table(sizes)
        known = {name: shape for name, shape in parameters.items() if name in table}
        parts = {name: tuple(table[name](shape[0])) for name, shape in known.items()}
        uses = dict[str, list[tuple[str, Part]]]()
        for name, own in parts.items():
            for part in own:
                uses.setdefault(part.tensor, []).append((name, part))
        shaped = {t: [(part, known[name]) for name, part in own] for t, own in uses.items()}
        return cls(known, parts, shape_of_parts(shaped), uses)
