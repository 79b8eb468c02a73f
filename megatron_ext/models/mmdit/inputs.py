"""What a forward pass takes, checked: nothing is swallowed, nothing is guessed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_ext.config.mmdit_sizes import MMDiTSizes
from megatron_ext.errors import ConfigError, DataError

SWITCHES = {"guidance": "guidance_embed", "cond": "cond_embed"}
"""Inputs that a model takes only if it was built for them."""


def check_inputs(
    sizes: MMDiTSizes, given: Mapping[str, Tensor | None], *, is_first_stage: bool
) -> None:
    """Compare inputs with the sizes and with each other.

    Args:
        sizes: of the model.
        given: all inputs of `MMDiT.forward` by name.
        is_first_stage: all but the ids may be None on the stages after it.

    Raises:
        ConfigError: an optional input that the model does not take, or one that is missing.
        DataError: a missing input, or one whose shape or dtype does not fit.
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
