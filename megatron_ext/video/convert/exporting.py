"""Exports a checkpoint of a video network as published weights, in any of their forms.

Tensors are read from the checkpoint and written one after another, so that memory holds only one
of them and the parameters that it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from tqdm import tqdm

from megatron_ext.checkpoint.adapters import FrozenBase
from megatron_ext.checkpoint.conversion import verified_folder
from megatron_ext.checkpoint.safetensors_files import (
    SAFETENSORS,
    check_target,
    plan_files,
    torch_dtype,
    write_others,
    write_tensors,
    written_aside,
)
from megatron_ext.checkpoint.state import PREFIX
from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.checkpoint.unpickling import (
    common_state_of,
    index_kept,
    read_tensors,
    stored_entries,
)
from megatron_ext.config.run import RunConfig
from megatron_ext.config.sections import described
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.transformer_config import params_dtype
from megatron_ext.video.config.rules import SECTIONS
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.convert.find import sizes_of
from megatron_ext.video.networks.published import Conversion, Form, Mapped, Shapes, seen_as
from megatron_ext.video.streaming.config import STORED_ROLES


@dataclass(frozen=True, kw_only=True)
class Export:
    """An order to export one network of a video run's checkpoint.

    Attributes:
        load: folder of checkpoints, the run's ``--save``.
        target: folder to create for config.json and safetensors, or file to create, if its name
            ends with ``.safetensors``.
        step: iteration of the checkpoint; None takes the latest.
        dtype: dtype to write; None takes the dtype of the run's parameters.
        max_shard_size: largest size of one file in a folder, in bytes or as text; None is 5 GB.
        ema: whether to write the averages of the weights (``--ema-decay``), which a streaming run
            keeps of its generator, instead of the weights themselves.
        network: the network of ``--task streaming`` to write, ``"generator"`` (None) or
            ``"critic"``; None for ``--task flow``.
        naming: the form to write, by its name; None takes the conversion's first for a folder, and
            its last, which is that of ComfyUI, for a file.
        prefix: text before all names of a file, such as ``model.diffusion_model.``.
    """

    load: Path
    target: Path
    step: int | None = None
    dtype: str | None = None
    max_shard_size: int | str | None = None
    ema: bool = False
    network: str | None = None
    naming: str | None = None
    prefix: str = ""


def export_weights(conversion: Conversion, order: Export) -> None:
    """Write one network of a video run's checkpoint as published weights.

    Raises:
        CheckpointError: a weight is missing, has another shape, or does not exist in the published
            model; or a folder cannot be read or written.
    """
    stored = read_run_config(order.load, order.step)
    run = RunConfig.from_dict(described(stored, SECTIONS), SECTIONS)
    if order.ema and order.network == "critic":
        raise CheckpointError(
            f"`--ema` is for the generator, but `--network` is {order.network}, of which a run "
            "keeps no averages; leave one of them out."
        )
    if order.network is not None and not run.section(VideoConfig).streams:
        raise CheckpointError(
            f"`--network {order.network}` is for a run of `--task streaming`, but {order.load} is "
            "of `--task flow`, which has one network; leave it out."
        )
    sizes = sizes_of(run, order.network)
    check_target(order.target)
    path = verified_folder(order.load, order.step)
    prefix = PREFIX if order.ema else STORED_ROLES[order.network or "generator"]
    is_file = order.target.suffix == SAFETENSORS
    for option, value in (("max-shard-size", order.max_shard_size), ("prefix", order.prefix)):
        if value and is_file == (option == "max-shard-size"):
            kind = "a single file" if is_file else "a folder"
            raise CheckpointError(
                f"`--{option}` ({value}) has no effect on {kind}, which `--hf` ({order.target}) "
                "is; leave it out."
            )
    form = _chosen_form(conversion, order, sizes)
    weights = _Weights(path, prefix, Mapped.of(form, sizes, conversion.parameters(sizes)))
    _check_form(conversion, form, sizes, weights.mapped.shapes, is_file=is_file)
    dtype = torch_dtype(order.dtype) if order.dtype else params_dtype(run.precision)
    with index_kept(path):
        weights.check(conversion, sizes)
        _write(order, form, sizes, weights, dtype)


def _write(order: Export, form: Form, sizes: Any, weights: _Weights, dtype: torch.dtype) -> None:
    """Write weights of this dtype as a single file, or as a folder, in a form."""
    is_file = order.target.suffix == SAFETENSORS
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in weights.mapped.shapes.items()
    }
    with written_aside(order.target, is_file=is_file) as folder:
        if is_file:
            files = {order.target.name: [*tensors]}
        else:
            files = plan_files(folder, tensors, order.max_shard_size or "5GB", form.stem)
        shown = {"unit": "tensor", "delay": 1.0, "leave": False, "disable": None}
        bar = tqdm(total=len(tensors), desc="Exporting", **shown)
        for file, names in files.items():
            some = {f"{order.prefix}{name}": tensors[name] for name in names}
            write_tensors(folder / file, some, weights.values(names, dtype, bar))
        if form.write_config is not None and not is_file:
            write_others(folder, form.write_config(sizes), ())


def _check_form(
    conversion: Conversion, form: Form, sizes: Any, shapes: Shapes, *, is_file: bool
) -> None:
    """Raise CheckpointError if a model that is written in this form would be read as another.

    The ``shapes`` of its tensors must tell its sizes; in a folder, config.json does so too.
    """
    place = Path(f"`--naming {form.name}`")
    if is_file:
        told = form.read_shapes(shapes, place)
    else:
        assert form.read_config is not None and form.write_config is not None
        told = form.read_config(form.write_config(sizes), place)
        if form.completed is not None:
            told = form.completed(told, shapes)
    for name, value in vars(sizes).items():
        if getattr(told, name) != value:
            others = [x for x in conversion.namings if x != form.name]
            raise CheckpointError(
                f"The model has {name} {value}, which {place} cannot tell: it would be read as "
                f"{getattr(told, name)}; choose another of {', '.join(others)}."
            )


def _chosen_form(conversion: Conversion, order: Export, sizes: Any) -> Form:
    """Return the form to write: that of ``--naming``, or else the first that has all parameters.

    For a file, it is the last. CheckpointError is raised if there is none for the target.
    """
    lacking = {
        form.name: sorted(conversion.parameters(sizes).keys() - form.table(sizes).keys())
        for form in conversion.forms
    }
    whole = [form for form in conversion.forms if not lacking[form.name]]
    if order.naming is not None:
        form = conversion.form(order.naming)
        if lacking[form.name]:
            names = ", ".join(form.name for form in whole)
            raise CheckpointError(
                f"`--naming {form.name}` has no place for `{lacking[form.name][0]}`; "
                + (f"choose {names}." if names else "export a run without the flag that adds it.")
            )
        fitting = [form]
    elif whole:
        fitting = whole
    else:
        least = min(lacking.values(), key=len)
        raise CheckpointError(
            f"{order.load} holds `{least[0]}`, which {conversion.title} does not have; export a "
            "run without the flag that adds it."
        )
    if order.target.suffix == SAFETENSORS:
        return fitting[-1]
    in_folders = [form for form in fitting if form.write_config is not None]
    if not in_folders:
        raise CheckpointError(
            f"`--hf` ({order.target}) is a folder, but this model is published as a single file "
            f"({', '.join(form.name for form in fitting)}); give a file that ends with "
            f"{SAFETENSORS}."
        )
    return in_folders[0]


class _Weights:
    """The weights of one network in a checkpoint, as public tensors.

    Args:
        path: folder of the checkpoint.
        prefix: beginning of the names that the network's parameters have there.
        mapped: where the parameters lie in the public tensors.
    """

    def __init__(self, path: Path, prefix: str, mapped: Mapped) -> None:
        self.path = path
        self.prefix = prefix
        self.mapped = mapped
        self._last: tuple[str, Tensor] | None = None

    def check(self, conversion: Conversion, sizes: Any) -> None:
        """Check that the checkpoint has exactly the weights of a published model of these sizes.

        A CheckpointError names the first that is missing, has another shape, or is unknown.
        """
        path = self.path
        stored = {
            name.removeprefix(self.prefix): tuple(entry.size)
            for name, entry in stored_entries(path).items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith(self.prefix)
        }
        needed = conversion.parameters(sizes)
        if not stored.keys() & needed.keys() and FrozenBase.recorded(common_state_of(path)):
            raise CheckpointError(
                f"{path} holds adapters without the weights under them; merge the two with "
                "`tools/lora.py merge`, and export what it writes, or export the adapters alone "
                "with `tools/lora.py export`."
            )
        for name, shape in needed.items():
            if name not in stored and not stored and self.prefix == PREFIX:
                raise CheckpointError(
                    f"{path} holds no averages of weights, which a run keeps by `--ema-decay`; "
                    "leave out `--ema`."
                )
            if name not in stored and not stored and self.prefix:
                raise CheckpointError(
                    f"{path} holds no critic, which only a training run of `--task streaming` "
                    "saves; leave out `--network`."
                )
            if name not in stored:
                raise CheckpointError(
                    f"{path} holds no `{self.prefix}{name}`, which its configuration implies; "
                    "export another checkpoint."
                )
            if stored[name] != shape:
                raise CheckpointError(
                    f"{path} holds `{self.prefix}{name}` with shape {list(stored[name])}, but its "
                    f"configuration implies {list(shape)}; export another checkpoint."
                )
        heads = tuple({f"{name.partition('.')[0]}." for name in needed})
        extra = [
            name for name in stored if name.startswith(heads) and name not in self.mapped.parameters
        ]
        if extra:
            raise CheckpointError(
                f"{path} holds `{self.prefix}{min(extra)}`, which {conversion.title} does not "
                "have; export a checkpoint of the plain model, adapters merged."
            )

    def values(self, names: Iterable[str], dtype: torch.dtype, bar: Any) -> Iterator[Tensor]:
        """Yield the values of public tensors."""
        for name in names:
            yield public_tensor(self.mapped, name, dtype, self._parameter)
            bar.update()

    def _parameter(self, name: str) -> Tensor:
        """Return one of our parameters, and keep it until another one is asked for.

        Neighbouring public tensors, such as queries and keys, are parts of one fused parameter.
        """
        if self._last is None or self._last[0] != name:
            self._last = None
            (values,) = read_tensors(self.path, [self.prefix + name]).values()
            self._last = name, values
        return self._last[1]


def public_tensor(
    mapped: Mapped, name: str, dtype: torch.dtype, parameter: Callable[[str], Tensor]
) -> Tensor:
    """Return the public tensor ``name``; ``parameter`` gives values by the name of ours."""
    shape = mapped.shapes[name]
    (first, part), *others = mapped.uses[name]
    if not others and part.step == 1 and mapped.parameters[first][0] == part.count:
        values = parameter(first)
        if values.dtype == dtype and values.numel() == math.prod(shape):
            return values.view(shape)
    full = torch.empty(shape, dtype=dtype)
    for ours, part in mapped.uses[name]:
        values = parameter(ours)
        seen = full.view(seen_as(full.shape, part, values.shape))
        rows = slice(part.start, part.start + (part.count - 1) * part.step + 1, part.step)
        columns = [slice(part.column, part.column + math.prod(values.shape[1:]))]
        index = (rows, *columns[: values.dim() - 1])
        seen[index] = values[part.row : part.row + part.count]
    return full
