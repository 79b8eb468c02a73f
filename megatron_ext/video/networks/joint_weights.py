"""Published weights of networks of double and single blocks: parameters, flags and sizes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.errors import CheckpointError
from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.config.sizes import TIMESTEP_WIDTH
from megatron_ext.video.networks.network import Sections
from megatron_ext.video.networks.published import Form, Rule, Shape, Shapes

ADAPTED = re.compile(
    r"(?:double_blocks\.\d+\.(?:txt|img)|single_blocks\.\d+)"
    r"\.(?:modulation|linear_(?:qkv|proj|fc1|fc2))$"
)
"""Pattern of the names of our layers that can have LoRA adapters."""

_OF_DATA = ("guidance_embed", "cond_embed", "channels", "text_width", "pooled_width")
"""Sizes that no named size decides for the weights: a run's data or its own flags do."""
_OF_FLAGS = (
    "num_double_blocks", "num_single_blocks", "axes_dim", "patch_size", "mlp_ratio", "rope_theta"
)  # fmt: skip
"""Sizes with flags of their own, which change a named size."""


def linear(name: str, outputs: int, inputs: int, *, bias: bool = True) -> dict[str, Shape]:
    """Return the shapes of a linear layer's weight and bias by name."""
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return {**weight, f"{name}.bias": (outputs,)} if bias else weight


def embedder(name: str, width: int, hidden_size: int) -> dict[str, Shape]:
    """Return the shapes of the two layers that embed vectors of ``width``."""
    h = hidden_size
    return linear(f"{name}.linear_in", h, width) | linear(f"{name}.linear_out", h, h)


def parameters(sizes: JointSizes, text: Shapes, *, cond_bias: bool = True) -> dict[str, Shape]:
    """Return the unsharded shape of each of a network's parameters by name, in module order.

    Args:
        text: the shapes of the module that embeds the text.
        cond_bias: whether the layer that embeds reference frames has a bias.
    """
    h = sizes.hidden_size
    m = sizes.mlp_size

    def norms(name: str) -> dict[str, Shape]:
        return {f"{name}.norm.{kind}_layernorm.weight": (sizes.head_dim,) for kind in "qk"}

    shapes = linear("embedding.img_in", h, sizes.token_width) | dict(text)
    shapes |= embedder("embedding.time_in", TIMESTEP_WIDTH, h)
    shapes |= embedder("embedding.pooled_in", sizes.pooled_width, h)
    if sizes.guidance_embed:
        shapes |= embedder("embedding.guidance_in", TIMESTEP_WIDTH, h)
    if sizes.cond_embed:
        shapes |= linear("embedding.cond_in", h, sizes.cond_width, bias=cond_bias)
    for number in range(sizes.num_double_blocks):
        for stream in ("txt", "img"):
            name = f"double_blocks.{number}.{stream}"
            shapes |= linear(f"{name}.modulation", 6 * h, h)
            shapes |= linear(f"{name}.linear_qkv", 3 * h, h, bias=sizes.qkv_bias)
            shapes |= norms(name)
            shapes |= linear(f"{name}.linear_proj", h, h)
            shapes |= linear(f"{name}.linear_fc1", m, h)
            shapes |= linear(f"{name}.linear_fc2", h, m)
    for number in range(sizes.num_single_blocks):
        name = f"single_blocks.{number}"
        shapes |= linear(f"{name}.modulation", 3 * h, h)
        shapes |= linear(f"{name}.linear_qkv", 3 * h, h, bias=sizes.qkv_bias)
        shapes |= linear(f"{name}.linear_fc1", m, h)
        shapes |= norms(name)
        shapes |= linear(f"{name}.linear_proj", h, h)
        shapes |= linear(f"{name}.linear_fc2", h, m, bias=False)
    shapes |= linear("final_layer.modulation", 2 * h, h)
    return shapes | linear("final_layer.linear", sizes.token_width, h)


def sections(
    sizes: JointSizes, flag: tuple[str, str], named: Mapping[str, JointSizes], **more: Any
) -> Sections:
    """Return the flags of a run whose network has these sizes, ``{section: {field: value}}``.

    Args:
        flag: section and field of the flag that names a size.
        named: the sizes that it can name.
        more: other flags of its section, by field, if none of them fits.
    """
    section, field = flag
    of_data = {name: getattr(sizes, name) for name in _OF_DATA}
    own: dict[str, Any] = {
        "guidance_embed": sizes.guidance_embed,
        "cond_embed": sizes.cond_embed,
        "channels": sizes.channels,
        "caption_width": sizes.text_width,
        "pooled_caption_width": sizes.pooled_width,
    }
    for name, other in named.items():
        if dataclasses.replace(other, **of_data) == sizes:
            return {section: {field: name}, "joint": own}
    own |= {name: getattr(sizes, name) for name in _OF_FLAGS}
    model = {"hidden_size": sizes.hidden_size, "num_attention_heads": sizes.num_heads}
    return {"model": model, "joint": own, **({section: more} if more else {})}


def forms(
    namings: Iterable[Enum],
    *,
    in_folders: Enum,
    classes: Sequence[str],
    read_config: Callable[[Mapping[str, Any], Path], Any],
    write_config: Callable[[Any], dict[str, Any]],
    knows: Callable[..., bool],
    read_shapes: Callable[..., Any],
    table: Callable[..., Mapping[str, Rule]],
) -> tuple[Form, ...]:
    """Return a network's published forms, of which one is published in folders with config.json.

    Args:
        namings: the schemes by which tensors are named, one for each form.
        in_folders: the scheme of the form in folders; the others are of single files alone.
        classes, read_config, write_config: the fields of `Form` that the form in folders has.
        knows, read_shapes, table: fields of all forms, functions that also take ``naming``.
    """
    of_folders: dict[str, Any] = {
        "classes": classes, "read_config": read_config, "write_config": write_config
    }  # fmt: skip
    return tuple(
        Form(
            name=naming.value,
            knows=partial(knows, naming=naming),
            read_shapes=partial(read_shapes, naming=naming),
            table=partial(table, naming=naming),
            **(of_folders if naming is in_folders else {}),
        )
        for naming in namings
    )


def entries_of(
    raw: Mapping[str, Any], path: Path, known: Mapping[str, Any], kind: str, use: str
) -> dict[str, Any]:
    """Return the entries of a config.json; raise CheckpointError for one that ``kind`` lacks.

    Args:
        raw: the content of the file at ``path``.
        known: the arguments of the class ``kind`` of diffusers, with the values that missing ones
            have.
        use: what to use instead, for the message.
    """
    unknown = [name for name in raw if name not in known and not name.startswith("_")]
    if unknown:
        raise CheckpointError(
            f"{path} says `{unknown[0]}` {raw[unknown[0]]!r}, which {kind} does not have; {use}"
        )
    return {name: raw.get(name, default) for name, default in known.items()}


def refuse_kin(shapes: Shapes, kin: Mapping[str, str], path: Path, use: str) -> None:
    """Raise CheckpointError if tensors are those of a relative, which is not supported.

    ``kin`` has, by the beginning of names that only a relative's tensors have, words for it.
    """
    for beginning, relative in kin.items():
        if any(name.startswith(beginning) for name in shapes):
            raise CheckpointError(f"{path} holds {relative}; {use}")


def mlp_ratio_of(width: int, hidden_size: int, path: Path, use: str) -> int:
    """Return the width of MLPs over the hidden size; raise CheckpointError if it is not whole."""
    if width < hidden_size or width % hidden_size:
        raise CheckpointError(
            f"{path} has MLPs of width {width}, which must be a multiple of the hidden size "
            f"({hidden_size}); {use}"
        )
    return width // hidden_size


def axes_of(head_dim: int, named: Mapping[str, JointSizes], path: Path) -> tuple[int, int, int]:
    """Return how many features of a head rotate by frame, row and column.

    No shape tells them, so they are those of a size in ``named`` with equal heads; CheckpointError
    is raised if there is none.
    """
    for sizes in named.values():
        if sizes.head_dim == head_dim:
            return sizes.axes_dim
    known = sorted({sizes.head_dim for sizes in named.values()})
    raise CheckpointError(
        f"{path} has heads of {head_dim} features, but how many of these rotate by frame, row and "
        f"column is known for {', '.join(map(str, known))} alone; give a folder with config.json."
    )
