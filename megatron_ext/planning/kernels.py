"""Counts the kernels of a training step, their operations and bytes, by class of kernels (`KINDS`).

A task's `Network.work` counts those of a micro-batch, and `update_work` those of the optimizer.
`hardware.Rates` turns the counts into seconds, and `budget` sums the seconds by class. A byte
counts each time that a kernel reads it from memory or writes it. `benchmarks/compare_profile.py`
sorts the kernels of a measured profile into the same classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.planning.stages import FP32, Ranks
from megatron_ext.planning.state import State

KINDS = {
    "linear": "matrix products of layers, with their weights",
    "weight gradients": "float32 sums of weight gradients that these products read and write",
    "attention": "attention, forward and backward",
    "head": "matrix products of the output layer",
    "logits": "cross-entropy of the logits and its gradient",
    "plumbing": "gradients that are set to zero, copied or added on their way to the buffer",
    "pointwise": "norms, activations, rotary embeddings and residual additions",
    "casts": "casts to 8 bits",
    "optimizer": "norm of the gradients and update of the weights",
    "gaps": "time between two kernels",
    "communication": "messages that computation does not hide",
}
"""The classes of kernels in the order of reports, each with a description."""

CASTS = {"delayed": (4, 1), "tensorwise": (6, 3), "rowwise": (8, 4)}
"""The cost of a cast to 8 bits, by recipe of `layers.fp8`: (bytes per 16-bit number, kernels).

The bytes are those read and written. A cast makes both layouts: the tensor and its transpose.
"""


def cast_of(recipe: str) -> tuple[int, int]:
    """Return (bytes per 16-bit number, number of kernels) of a cast to 8 bits by ``recipe``.

    Recipes that `CASTS` lacks are Transformer Engine's; they are assumed to cost as much as
    "tensorwise".
    """
    return CASTS.get(recipe, CASTS["tensorwise"])


class Phase(Enum):
    """The part of a step that a kernel belongs to."""

    FORWARD = "forward"
    INPUT = "gradient of the input"
    WEIGHT = "gradient of the weights"
    UPDATE = "update"


@dataclass(frozen=True)
class Work:
    """Counts of one class's kernels, for one phase of a micro-batch or for a step's update.

    Attributes:
        kind: a key of `KINDS`.
        flops: operations of matrix products on numbers of ``width`` bytes.
        num_bytes: bytes read and written, except the operands and results of matrix products,
            which the rate of the products accounts for.
        kernels: number of kernels.
        graphed: whether a CUDA graph launches these kernels.
    """

    kind: str
    phase: Phase
    flops: float = 0.0
    num_bytes: float = 0.0
    kernels: float = 0.0
    width: int = 2
    graphed: bool = False

    def __mul__(self, times: float) -> Work:
        return replace(
            self,
            flops=self.flops * times,
            num_bytes=self.num_bytes * times,
            kernels=self.kernels * times,
        )


def gradient_bytes(
    num_microbatches: int, recipe: str | None = None, *, overwrites: bool = True
) -> float:
    """Return the bytes moved to sum weight gradients, per weight, as a mean over micro-batches.

    Without an fp8 ``recipe`` (None), the matrix product of a weight gradient reads a float32 sum (4
    bytes) and writes it (4 bytes). In fp8 it cannot add: it writes a float32 result, which a
    separate kernel adds to the sum. With the recipe "rowwise" its result has 16 bits, and is cast
    to float32 first. The first 2 bytes that a product writes for each weight are not counted,
    because the assumed rate of products includes them.

    Args:
        overwrites: whether the first micro-batch's gradient is written into the sum, not added.
    """
    first = FP32 - 2
    other = 2 * FP32 - 2
    if recipe is not None:
        other = 4 * FP32 - 2
    if recipe == "rowwise":
        first = 2 + FP32
        other = 2 + FP32 + 3 * FP32
    return ((first if overwrites else other) + (num_microbatches - 1) * other) / num_microbatches


def update_work(optimizer: OptimizerConfig, ranks: Ranks, state: State) -> list[Work]:
    """Return the kernels between the last backward pass of a step and the next forward pass.

    They move these bytes per weight that the rank updates:

    - 4 to read the gradient for the norm, and 4 to read it for the update;
    - twice the size of the optimizer state;
    - 2 to write the model's weight in 16-bit runs, else 8 to read and write the weight itself;
    - with SGD or an optimizer of the user's own, whose gradients are scaled by separate kernels: 4
      to write the clipped gradient, in 16-bit runs 4 to read the float32 weight again, and 8 to
      read and write each gradient in the buffer, when it is divided by the number of tokens;
    - with averaged weights: reading and writing the average, and reading the weight.

    Setting the gradients of layers to zero is not counted here: usually the first micro-batch
    overwrites them, and otherwise `Network.products` counts it.
    """
    on_host = optimizer.optimizer in ("sgd", "custom")
    per_weight = 2 * FP32 + (ranks.width if ranks.half else 2 * FP32)
    if on_host:
        per_weight += FP32 + (FP32 if ranks.half else 0)
    moved = per_weight * state.updated + 2 * state.optimizer + 3 * state.average
    moved += 2 * state.gradients if on_host else 0
    return [Work("optimizer", Phase.UPDATE, num_bytes=moved, kernels=60)]
