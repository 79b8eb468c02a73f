"""Opens published weights of a video network, and fills models with them.

Each rank reads only the slices of its own parameters, in any layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_ext.checkpoint.safetensors_files import SAFETENSORS
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.initialization import Shard
from megatron_ext.video.convert.files import PICKLED, PlainTensors, open_file, open_folder
from megatron_ext.video.convert.find import (
    check_file,
    check_no_pointer,
    form_of_folder,
    form_of_index,
    form_of_names,
    read_config,
)
from megatron_ext.video.networks.published import Conversion, Form, Mapped, Part, seen_as


@dataclass(frozen=True)
class Description:
    """A description of a model of published weights, without its tensors.

    Attributes:
        source: its folder or file.
        sizes: its sizes, of the network's own class.
    """

    source: Path
    conversion: Conversion
    form: Form
    sizes: Any


@dataclass(frozen=True)
class Published(Description):
    """An opened model of published weights.

    Attributes:
        tensors: its tensors.
    """

    tensors: PlainTensors

    @property
    def description(self) -> Description:
        """Return what describes the model when it has been closed."""
        return Description(self.source, self.conversion, self.form, self.sizes)

    @cached_property
    def mapped(self) -> Mapped:
        """Return where the values of our parameters lie in the tensors."""
        return Mapped.of(self.form, self.sizes, self.conversion.parameters(self.sizes))

    def check(self) -> None:
        """Check that names and shapes of the tensors are exactly those of a model of its sizes.

        A CheckpointError names the first tensor that is missing, has another shape, or is unknown,
        or is of a type that cannot be read.
        """
        actual = self.tensors.shapes()
        title = self.conversion.title
        for name, shape in self.mapped.shapes.items():
            if name not in actual:
                raise CheckpointError(
                    f"{self.source} holds no `{name}`, which {title} has; copy the whole model "
                    "again."
                )
            if actual[name] != shape:
                raise CheckpointError(
                    f"{self.source} holds `{name}` with shape {list(actual[name])}, but the sizes "
                    f"of the model imply {list(shape)}; copy the whole model again."
                )
        ignored = self.form.ignored
        extra = [
            name
            for name in actual.keys() - self.mapped.shapes.keys()
            if ignored is None or not ignored.search(name)
        ]
        if extra:
            raise CheckpointError(
                f"{self.source} holds `{min(extra)}`, which {title} does not have; use a model "
                "without it."
            )
        self.tensors.dtypes()

    def parameter(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return our whole parameter ``name``."""
        shape = self.mapped.parameters[name]
        values = torch.empty(shape, dtype=dtype)
        self.copy(name, [0] * len(shape), values)
        return values

    @torch.no_grad()
    def copy(self, name: str, offset: Sequence[int], target: Tensor) -> None:
        """Copy a block of our parameter ``name``, which begins at ``offset``, to ``target``."""
        full = self.mapped.parameters[name]
        for part in self.mapped.parts[name]:
            own, theirs = _overlap(part, offset, target.shape)
            if own.stop > own.start:
                seen = seen_as(self.mapped.shapes[part.tensor], part, full)
                self.tensors.copy(part.tensor, seen, theirs, target[own])


def _overlap(
    part: Part, offset: Sequence[int], shape: Sequence[int]
) -> tuple[slice, tuple[slice, ...]]:
    """Return where a part and a block of our parameter overlap.

    The block begins at the index ``offset`` of the parameter and has the shape ``shape``. The
    overlap is returned as a slice of the block's rows, which may be empty, and as an index into the
    public tensor.
    """
    low = max(part.row, offset[0])
    high = max(low, min(part.row + part.count, offset[0] + shape[0]))
    first = part.start + (low - part.row) * part.step
    rows = slice(first, first + max(0, high - low - 1) * part.step + 1, part.step)
    starts = [part.column + start for start in offset[1:]]
    columns = [slice(start, start + size) for start, size in zip(starts, shape[1:], strict=True)]
    return slice(low - offset[0], high - offset[0]), (rows, *columns)


@contextmanager
def open_published(
    source: Path, entry: str | None = None, flag: str = "--entry"
) -> Iterator[Published]:
    """Open the weights in a folder or file; yield the model, of which nothing is checked yet.

    A folder's config.json tells the network and its sizes, and the names of its tensors the form;
    of a file, and of a folder that has an index instead, names and shapes of the tensors tell all.

    Args:
        source: folder with config.json or an index of safetensors, or a file; both of safetensors
            or torch.save.
        entry: key in a torch.save file; None takes the file's only dictionary of tensors.
        flag: the flag that gives ``entry``, for messages.

    Raises:
        CheckpointError: the weights cannot be read or converted.
    """
    if not source.exists():
        raise CheckpointError(
            f"{source} does not exist; give a folder or file of weights on this machine, since "
            "nothing is fetched from a hub."
        )
    if source.is_file():
        check_file(source)
        with open_file(source, entry, flag) as tensors:
            conversion, form = form_of_names(tensors.names, source)
            sizes = form.read_shapes(tensors.shapes(), source)
            yield Published(source, conversion, form, sizes, tensors)
        return
    if entry is not None:
        raise CheckpointError(
            f"`{flag} {entry}` is for a file of torch.save, but {source} is a folder; leave it out."
        )
    listed = form_of_index(source)
    if listed is not None:
        stem, conversion, form = listed
        with open_folder(source, stem) as tensors:
            sizes = form.read_shapes(tensors.shapes(), source)
            yield Published(source, conversion, form, sizes, tensors)
        return
    conversion, named = form_of_folder(source)
    for suffix in (SAFETENSORS, PICKLED):
        for path in source.glob(f"{named.stem}*{suffix}"):
            check_no_pointer(path)
    form = _form_of_tensors(source, conversion, named)
    sizes = None
    if form.read_config is not None:
        sizes = form.read_config(read_config(source), source / "config.json")
    with open_folder(source, named.stem) as tensors:
        if sizes is None:
            sizes = form.read_shapes(tensors.shapes(), source)
        elif form.completed is not None:
            sizes = form.completed(sizes, tensors.shapes())
        yield Published(source, conversion, form, sizes, tensors)


def _form_of_tensors(folder: Path, conversion: Conversion, named: Form) -> Form:
    """Return the form of a folder's tensors: ``named`` by config.json, or one that knows them.

    VideoX-Fun has a class of diffusers' name for weights with the names of the original repository.
    """
    try:
        with open_folder(folder, named.stem) as tensors:
            names = tensors.names
    except CheckpointError:
        return named  # Who opens the folder then is told why it cannot be read.
    forms = (named, *conversion.forms)
    return next((form for form in forms if form.knows(names)), named)


def fill(shards: Iterable[Shard], model: Published, bar: str = "Loading") -> None:
    """Fill shards of parameters from published weights.

    A CheckpointError is raised for a parameter that the published model does not have.
    """
    shown = {"unit": "tensor", "delay": 1.0, "leave": False, "disable": None}
    for shard in tqdm(list(shards), bar, **shown):
        if shard.name not in model.mapped.parameters:
            raise CheckpointError(
                f"`{shard.name}` has no place in {model.conversion.title} ({model.source}); leave "
                "out the flag that adds it."
            )
        model.copy(shard.name, shard.offset, shard.tensor)
