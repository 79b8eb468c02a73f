"""What a forward pass takes, checked."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.config.video_dit_sizes import VideoDiTSizes
from megatron_ext.errors import DataError


def check_inputs(sizes: VideoDiTSizes, x: Tensor, timesteps: Tensor, text: Tensor) -> None:
    """Compare inputs with the sizes and with each other.

    Raises:
        DataError: one whose shape or dtype does not fit.
    """
    if x.dim() != 5 or x.size(2) != sizes.channels or 0 in x.shape:
        raise DataError(
            f"`x` has the shape {list(x.shape)}, but the model takes [b, t, {sizes.channels}, h, "
            "w], latent frames before channels."
        )
    b, t = x.shape[:2]
    if timesteps.shape not in ((b,), (b, t)):
        raise DataError(
            f"`timesteps` has the shape {list(timesteps.shape)}, but must be [{b}] for one of each "
            f"sample or [{b}, {t}] for one of each frame."
        )
    if timesteps.dtype not in (torch.float32, torch.float64):
        raise DataError(
            f"`timesteps` has the type {timesteps.dtype}, but must be float32: in 16 bits "
            "timesteps near 1000 have steps of 4."
        )
    if text.dim() != 3 or text.size(0) != b or text.size(2) != sizes.text_width or 0 in text.shape:
        raise DataError(
            f"`text` has the shape {list(text.shape)}, but must be [{b}, l, {sizes.text_width}]."
        )
