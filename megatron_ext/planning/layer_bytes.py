"""What a part of a model keeps for its backward pass, and how parts add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.planning.contents import Ranks

FP32 = 4
INT64 = 8


@dataclass(frozen=True)
class LayerBytes:
    """What one layer keeps, and what its backward pass needs besides for a moment.

    Attributes:
        kept: from the forward to the backward pass.
        transient: the most beyond ``kept`` while its gradients are computed.
    """

    kept: int
    transient: int


def in_order(*parts: LayerBytes) -> LayerBytes:
    """Parts that run one after the other; backward, the last one has gone before the others."""
    transient = released = 0
    for part in reversed(parts):
        transient = max(transient, part.transient - released)
        released += part.kept
    return LayerBytes(released, transient)


def recomputed(
    layers: Sequence[LayerBytes], entering: int, *, size: int, limit: int
) -> list[LayerBytes]:
    """Layers of which some keep only their input, and are run again one unit after the other.

    Args:
        layers: without recomputation.
        entering: bytes of the input of a layer.
        size: layers of a unit.
        limit: layers that are run again, the first ones.
    """
    limit = min(limit, len(layers))
    found = []
    for first in range(0, limit, size):
        again = in_order(*layers[first : min(first + size, limit)])
        found.append(LayerBytes(entering, again.kept + again.transient))
    return found + list(layers[limit:])


def rms_norm(ranks: Ranks, rows: int, size: int, *, frozen: bool = False) -> int:
    """What torch's RMSNorm of ``[rows, size]`` keeps besides its input.

    Args:
        ranks: of the run.
        rows, size: of the input.
        frozen: its weight is not trained.
    """
    statistics = rows * FP32
    if ranks.gpu:
        return statistics
    # On a CPU the normed input is kept for the weight, and of 16 bits the input in fp32 instead.
    normed = 0 if frozen else rows * size * FP32
    return statistics + normed + (rows * size * (FP32 - ranks.width) if ranks.half else 0)


def layer_norm(rows: int) -> int:
    """The mean and the reciprocal deviation of each row that torch's LayerNorm keeps."""
    return 2 * rows * FP32
