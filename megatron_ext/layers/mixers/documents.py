"""Reads from an attention mask what recurrent mixers need: where documents begin."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.layers.masks import is_dense, newest


def documents_of_mask(mask: Tensor | None, mixer: str) -> Tensor | None:
    """Return the document index of each position, ``[b, s]``; None for one document.

    Args:
        mask: documents or a dense mask, see `layers.masks`; None means one document.
        mixer: name of the mixer, for the error.

    Raises:
        ConfigError: the mask is dense, and not that of causal attention: a recurrence cannot skip
            positions.
    """
    if not is_dense(mask):
        return mask

    def is_causal() -> bool:
        future = mask.new_ones(mask.shape[-2:]).triu(1)
        return bool((mask == future).all())

    if not newest.find(mask, "causal", is_causal):
        raise ConfigError(
            f"a dense attention mask {tuple(mask.shape)} that is not causal does not go with "
            f"{mixer}, whose states cannot skip positions; give the document index of each "
            "position instead."
        )
    return None
