"""Selects what the clips of a micro-batch give to the model, each by its condition mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.errors import DataError
from megatron_ext.video.config.run import MODES, ConditionConfig
from megatron_ext.video.data.conditions import (
    MASKED_PREFIX,
    masked_name,
    place_references,
    sections,
)
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.shards import image_field


def reference_latents(batch: VideoBatch, modes: Tensor, config: ConditionConfig) -> Tensor:
    """Return latents ``[b, c, t, h, w]`` with the reference frames of each clip, zero elsewhere.

    ``modes`` ``[b]`` are the clips' condition modes, as indices into `MODES`. DataError is raised
    if the batch lacks the encoded frames that a mode needs.
    """
    placed = []
    latents = batch.latents
    for row, mode in enumerate(modes.tolist()):
        pieces = []
        for section in sections(MODES[mode], latents.size(2), config):
            if section.name not in batch.references:
                raise lacks(section.name)
            pieces.append((section, batch.references[section.name][row]))
        placed.append(place_references(pieces, latents.shape[1:], latents.dtype, latents.device))
    return torch.stack(placed)


def masked_latents(batch: VideoBatch, modes: Tensor, config: ConditionConfig) -> Tensor:
    """Return latents ``[b, c, t, h, w]`` of the clips with zero pixels at frames not given.

    ``modes`` ``[b]`` are the clips' condition modes, as indices into `MODES`. DataError is raised
    if the batch lacks what a mode needs.
    """
    found = []
    for row, mode in enumerate(modes.tolist()):
        name = masked_name(MODES[mode], config)
        if name not in batch.references:
            raise lacks(name)
        found.append(batch.references[name][row])
    return torch.stack(found)


def image_embeds(
    batch: VideoBatch, modes: Tensor, config: ConditionConfig, places: Sequence[str]
) -> Tensor:
    """Return the image encoder's output for the given frames, ``[b, n * tokens, width]``.

    ``modes`` ``[b]`` are the clips' condition modes, as indices into `MODES`. ``places`` has n
    words: "head", "tail" and "middle" are these frames, "first" is the first frame that the mode
    gives. A frame that the mode does not give is zero. DataError is raised if the batch has no
    embedding of a given frame.
    """
    if not batch.image_embeds:
        raise lacks(image_field("head"))
    like = next(iter(batch.image_embeds.values()))[0]
    rows = []
    for row, mode in enumerate(modes.tolist()):
        given = [x.side for x in sections(MODES[mode], batch.latents.size(2), config)]
        parts = []
        for place in places:
            side = given[0] if place == "first" and given else place
            if side not in given:
                parts.append(torch.zeros_like(like))
                continue
            if side not in batch.image_embeds:
                raise lacks(image_field(side))
            parts.append(batch.image_embeds[side][row])
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def lacks(name: str) -> DataError:
    """Return the error for clips without what a set would have under ``name``."""
    return DataError(
        f"The clips have no reference {name}, but a condition mode needs it; preprocess them with "
        f"{remedy_for(name)}."
    )


def remedy_for(name: str) -> str:
    """Return the flags with which a set gets what it has under ``name``, for an error message.

    ``name`` is that of a reference, of a masked clip, or of an image embedding, such as
    ``image_tail``.
    """
    kind, _, side = name.rstrip("0123456789").rpartition("_")
    flags = []
    if kind == "image":
        flags.append("--image-encoder")
    if f"{kind}_" == MASKED_PREFIX or (kind and side != "head"):
        flags.append(f"--masked-references {side}")
    elif not kind and side == "middle":
        flags.append("--middle-reference")
    if kind != "image" and side in ("head", "tail"):
        flags.append(f"--reference-lengths {name.removeprefix(MASKED_PREFIX).removeprefix(side)}")
    return f"`{' '.join(flags)}`"
