"""What NVIDIA GPUs of a compute capability multiply in 8 bits."""

from __future__ import annotations

Capability = tuple[int, int]

FP8: Capability = (8, 9)
"""Of the first GPUs with 8-bit products, Ada; Hopper (9.0) and newer have them too."""

FIRST: dict[str, Capability] = {
    "delayed": FP8,
    "tensorwise": FP8,
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}
"""The first compute capability with the products of a recipe of Transformer Engine; a recipe of the
user's own may need any.
"""

CONSUMER_BLACKWELL: Capability = (12, 0)
"""The first without MXFP8 again."""


def engine_recipes(capability: Capability) -> tuple[str, ...]:
    """Recipes of Transformer Engine that a GPU has the products for.

    The rules are those of ``transformer_engine/pytorch/quantization.py`` 2.9: its blocks of 128
    are made for Hopper, and MXFP8 for Blackwell of data centres (10.0 and 10.3).
    """
    return tuple(
        recipe
        for recipe, first in FIRST.items()
        if first <= capability and not (recipe == "mxfp8" and capability >= CONSUMER_BLACKWELL)
    )
