"""How a run is cut into ranks and stages, and how the bytes that its layers keep add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_ext.config.run import RunConfig
from megatron_ext.parallel.grid import Layout

FP32 = 4
INT64 = 8

Numbers = TypeVar("Numbers", bound="Summed")


class Summed:
    """A dataclass of numbers that are added field by field."""

    def __add__(self: Numbers, other: Numbers) -> Numbers:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(mine + theirs for mine, theirs in pairs))


@dataclass(frozen=True)
class Ranks:
    """The parallel sizes of a run, whatever its model is.

    Attributes:
        b: samples of a micro-batch.
        width: bytes of a number in activations and in the parameters of the forward pass.
        gpu: the fused kernels of a GPU are used.
    """

    b: int
    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int
    expert_dp: int
    sequence_parallel: bool
    width: int
    gpu: bool

    @classmethod
    def of(cls, config: RunConfig) -> Ranks:
        """Return the sizes of a resolved run."""
        layout = Layout.from_config(config.parallel)
        sizes, experts = layout.sizes(), layout.expert_sizes()
        return Ranks(
            b=config.training.micro_batch_size or 0,
            **{name: sizes[name] for name in ("tp", "cp", "pp", "dp")},
            ep=experts["ep"],
            etp=experts["tp"],
            expert_dp=experts["dp"],
            sequence_parallel=config.parallel.sequence_parallel,
            width=2 if config.precision.bf16 or config.precision.fp16 else 4,
            gpu=config.device == "cuda",
        )

    @property
    def half(self) -> bool:
        """Return whether numbers have 16 bits."""
        return self.width == 2

    @property
    def sequence_size(self) -> int:
        """Return how many tensor-parallel ranks cut the sequence between the parallel layers."""
        return self.tp if self.sequence_parallel else 1


@dataclass(frozen=True)
class Stage:
    """The parts of the model that one stage holds.

    Attributes:
        index: position along the model.
        chunk: its index among the chunks of its rank.
        layers: numbers of its layers, from 0.
        head: it holds the output layer and the loss.
    """

    index: int
    rank: int
    chunk: int
    layers: tuple[int, ...]
    depths: int
    embedding: bool
    final_norm: bool
    head: bool

    @classmethod
    def of_layers(
        cls, layers: Sequence[int], index: int, num_stages: int, *, rank: int = 0, chunk: int = 0
    ) -> Stage:
        """Return a stage whose model embeds on its first stage and ends on its last one."""
        first, last = index == 0, index == num_stages - 1
        return cls(index, rank, chunk, tuple(layers), 0, first, last, last)


@dataclass(frozen=True)
class LayerBytes:
    """The memory that autograd takes for one layer.

    Attributes:
        kept: bytes from the forward to the backward pass.
        transient: the most bytes beyond ``kept`` while its gradients are computed.
    """

    kept: int
    transient: int


def in_order(*parts: LayerBytes) -> LayerBytes:
    """Join parts that run one after the other; backward, a part is freed before those before it."""
    transient = released = 0
    for part in reversed(parts):
        transient = max(transient, part.transient - released)
        released += part.kept
    return LayerBytes(released, transient)


def recomputed(
    layers: Sequence[LayerBytes], layer_input: int, *, size: int, limit: int
) -> list[LayerBytes]:
    """Return the layers of a stage where the first ``limit`` are run again, ``size`` at a time.

    These keep the bytes of their input only.
    """
    run_again, others, found = layers[:limit], layers[limit:], []
    for first in range(0, len(run_again), size):
        again = in_order(*run_again[first : first + size])
        found.append(LayerBytes(layer_input, again.kept + again.transient))
    return [*found, *others]


def rms_norm(ranks: Ranks, rows: int, size: int, *, frozen: bool = False) -> int:
    """Return the bytes that torch's RMSNorm of ``[rows, size]`` keeps besides its input."""
    statistics = rows * FP32
    if ranks.gpu:
        return statistics
    # On a CPU the normed input is kept for the weight, and of 16 bits the input in fp32 instead.
    normed = 0 if frozen else rows * size * FP32
    return statistics + normed + (rows * size * (FP32 - ranks.width) if ranks.half else 0)


def layer_norm(rows: int) -> int:
    """Return the bytes of the mean and reciprocal deviation that torch's LayerNorm keeps."""
    return 2 * rows * FP32
