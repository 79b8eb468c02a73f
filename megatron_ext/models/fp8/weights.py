"""Weights that are cast to 8 bits once a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_ext.models.fp8.scaling import Scaling


class KeptWeights:
    """The 8-bit weights of a rank's model chunks, while nothing changes the weights.

    Within `kept` a layer casts its weight at its first use, as it is and transposed, for all
    micro-batches, chunks and recomputations. That is 2 bytes for each parameter of an 8-bit layer,
    beside the bfloat16 weight; they are given back before the optimizer updates the weights, so
    that they never meet its temporary memory, and an average that is swapped in for an evaluation
    never meets them. Outside a layer casts its weight whenever it needs it.

    Args:
        chunks: of the model, with or without wrappers; without 8-bit layers nothing is kept.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._scalings = [
            module for chunk in chunks for module in chunk.modules() if isinstance(module, Scaling)
        ]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep them within; the weights must not change."""
        for scaling in self._scalings:
            scaling.keeps_weight = True
        try:
            yield
        finally:
            for scaling in self._scalings:
                scaling.keeps_weight, scaling.kept_weight = False, None
