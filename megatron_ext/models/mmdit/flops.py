"""Floating-point operations of an MMDiT."""

from __future__ import annotations

from megatron_ext.config.mmdit_sizes import TIMESTEP_WIDTH, MMDiTSizes
from megatron_ext.models.flops import FORWARD_AND_BACKWARD, MULTIPLY_AND_ADD


def flops_of_clip(sizes: MMDiTSizes, num_text: int, num_image: int) -> float:
    """Of one clip through the model, forward and backward.

    Matrix products only; attention is bidirectional and counts in full; recomputation does not
    count.

    Args:
        sizes: of the model.
        num_text, num_image: tokens.
    """
    h, m = sizes.hidden_size, sizes.mlp_size
    tokens = num_text + num_image
    # Queries, keys, values and projection, both MLP matrices, scores and their product with
    # values; the same in blocks of both kinds.
    block = tokens * (4 * h * h + 2 * h * m + 2 * tokens * h)
    modulation = h * h * (12 * sizes.num_double_blocks + 3 * sizes.num_single_blocks + 2)
    embedders = num_image * sizes.token_width * h * 2 + num_text * sizes.text_width * h
    embedders += (TIMESTEP_WIDTH + sizes.pooled_width + 2 * h) * h
    if sizes.cond_embed:
        embedders += num_image * sizes.cond_width * h
    if sizes.guidance_embed:
        embedders += (TIMESTEP_WIDTH + h) * h
    products = block * sizes.num_blocks + modulation + embedders
    return float(FORWARD_AND_BACKWARD * MULTIPLY_AND_ADD * products)
