"""The inputs of an MMDiT: what they must be, and how the first stage embeds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.mmdit import TIMESTEP_WIDTH, MMDiTSizes
from megatron_ext.video.model.linear import mark_replicated
from megatron_ext.video.model.modulation import VectorEmbedder, mark_new_branch, start_at_zero
from megatron_ext.video.model.tokens import TokenRange

SWITCHES = {"guidance": "guidance_embed", "cond": "cond_embed"}
"""Inputs that a model takes only if it was built for them."""


def check_inputs(
    sizes: MMDiTSizes, given: Mapping[str, Tensor | None], *, is_first_stage: bool
) -> None:
    """Check the inputs of `MMDiT.forward` against the sizes and each other.

    Args:
        given: all inputs by name.
        is_first_stage: later stages may get None for all but the ids.

    Raises:
        ConfigError: the model does not take an optional input that is given, or needs a missing
            one.
        DataError: an input is missing, or its shape or type does not fit.
    """
    for name, switch in SWITCHES.items():
        _check_optional(name, given[name], switch, getattr(sizes, switch), is_first_stage)
    _check_present(given, is_first_stage)
    image, text = given["img_ids"], given["txt_ids"]
    assert image is not None and text is not None
    batch, num_image, num_text = image.size(0), image.size(1), text.size(1)
    shapes = {
        "img": (batch, num_image, sizes.token_width),
        "img_ids": (batch, num_image, 3),
        "txt": (batch, num_text, sizes.text_width),
        "txt_ids": (batch, num_text, 3),
        "timesteps": (batch,),
        "y_vec": (batch, sizes.pooled_width),
        "guidance": (batch,),
        "cond": (batch, num_image, sizes.cond_width),
    }
    for name, shape in shapes.items():
        tensor = given[name]
        if tensor is not None and tensor.shape != shape:
            raise DataError(
                f"`{name}` has the shape {list(tensor.shape)}, but the model takes {list(shape)}; "
                "see the widths in its sizes."
            )
    _check_precision(given)


def _check_optional(
    name: str, tensor: Tensor | None, switch: str, taken: bool, is_first_stage: bool
) -> None:
    if taken and tensor is None and is_first_stage:
        raise ConfigError(f"`{name}` is missing, but the model was built with `{switch}`; give it.")
    if not taken and tensor is not None:
        raise ConfigError(
            f"`{name}` was given, but the model was built without `{switch}` and would ignore it; "
            f"leave it out or set `{switch}`."
        )


def _check_present(given: Mapping[str, Tensor | None], is_first_stage: bool) -> None:
    for name, tensor in given.items():
        is_ids = name.endswith("_ids")
        if tensor is None and (is_ids or is_first_stage) and name not in SWITCHES:
            raise DataError(
                f"`{name}` is None, but every stage needs the ids, and the first all inputs; "
                "give it."
            )
        if is_ids and tensor is not None and tensor.dim() != 3:
            raise DataError(
                f"`{name}` has the shape {list(tensor.shape)}, but must be [batch, tokens, 3]."
            )


def _check_precision(given: Mapping[str, Tensor | None]) -> None:
    for name in ("timesteps", "guidance"):
        tensor = given[name]
        if tensor is not None and tensor.dtype not in (torch.float32, torch.float64):
            raise DataError(
                f"`{name}` has the type {tensor.dtype}, but must be float32: in 16 bits 1000 t "
                "has steps of up to 4."
            )


MAX_PERIOD = 10_000.0


TIME_FACTOR = 1000.0


def timestep_sinusoid(u: Tensor) -> Tensor:
    """Return the sinusoid of ``1000 u`` in float32: 128 cosines, then the sines of the same angles.

    The frequencies are ``exp(-ln(10000) j / 128)``. A timestep must come in float32: rounded to
    bfloat16 before, 1000 u would have steps of 4 between 512 and 1024.

    Args:
        u: ``[b]``, timesteps from 0 to 1 or guidance strengths.

    Returns:
        ``[b, 256]``.
    """
    half = TIMESTEP_WIDTH // 2
    steps = torch.arange(half, dtype=torch.float32, device=u.device)
    frequencies = torch.exp(-math.log(MAX_PERIOD) * steps / half)
    angles = (TIME_FACTOR * u.float())[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class Embedding(MegatronModule):  # type: ignore[misc]
    """The layers by which the first stage embeds tokens, timestep, pooled text and guidance.

    The branch of the condition starts at zero, so that it changes nothing when it is added to a
    model trained without.
    """

    def __init__(
        self, config: TransformerConfig, sizes: MMDiTSizes, tp_group: ProcessGroup
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        h = sizes.hidden_size
        self.img_in = torch.nn.Linear(sizes.token_width, h)
        self.txt_in = torch.nn.Linear(sizes.text_width, h)
        self.time_in = VectorEmbedder(TIMESTEP_WIDTH, h)
        self.pooled_in = VectorEmbedder(sizes.pooled_width, h)
        self.guidance_in = VectorEmbedder(TIMESTEP_WIDTH, h) if sizes.guidance_embed else None
        self.cond_in = torch.nn.Linear(sizes.cond_width, h) if sizes.cond_embed else None
        if self.cond_in is not None:
            start_at_zero(self.cond_in)
            mark_new_branch(self.cond_in)
        mark_replicated(self, config)

    def forward(self, given: Mapping[str, Any], held: TokenRange) -> tuple[Tensor, Tensor]:
        """Embed the tokens that this rank holds, and the vector that modulates every block.

        Args:
            given: inputs of `MMDiT.forward` by name, checked.
            held: which of the tokens to embed.

        Returns:
            Text before image tokens, ``[s, b, h]``, and vec, ``[b, h]``.
        """
        dtype = self.img_in.weight.dtype
        image = self.img_in(given["img"][:, held.image].to(dtype))
        if self.cond_in is not None:
            image = image + self.cond_in(given["cond"][:, held.image].to(dtype))
        text = self.txt_in(given["txt"][:, held.text].to(dtype))
        vec = self.time_in(timestep_sinusoid(given["timesteps"])) + self.pooled_in(given["y_vec"])
        if self.guidance_in is not None:
            vec = vec + self.guidance_in(timestep_sinusoid(given["guidance"]))
        return torch.cat((text, image), dim=1).transpose(0, 1), vec
