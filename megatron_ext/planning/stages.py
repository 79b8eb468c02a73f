"""The parallel sizes of a run, its pipeline stages, and the activation memory of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from megatron_ext.config.run import RunConfig
from megatron_ext.parallel.grid import Layout

FP32 = 4
INT64 = 8

Numbers = TypeVar("Numbers", bound="Summed")


class Summed:
    """The base class of dataclasses of numbers; ``+`` and ``*`` work field by field."""

    def __add__(self: Numbers, other: Numbers) -> Numbers:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(mine + theirs for mine, theirs in pairs))

    def __mul__(self: Numbers, times: float) -> Numbers:
        return type(self)(*(number * times for number in vars(self).values()))


@dataclass(frozen=True)
class Ranks:
    """The parallel sizes of a run, its micro-batch size and its number format.

    Attributes:
        b: samples of a micro-batch.
        dp: data-parallel size, without context parallelism.
        ep, etp: expert-parallel and expert-tensor-parallel size.
        expert_dp: number of replicas of each expert.
        width: bytes of a number in activations and in the parameters of the forward pass.
        gpu: whether the run is on GPUs, and thus uses their fused kernels.
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
        """Return the parallel sizes and number format of a run, from its resolved configuration."""
        layout = Layout.from_config(config.parallel)
        sizes = layout.sizes()
        experts = layout.expert_sizes()
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
        """Return whether activations and the parameters of the forward pass have 16 bits."""
        return self.width == 2

    @property
    def sequence_size(self) -> int:
        """Return the number of ranks that share a sequence by sequence parallelism; else 1."""
        return self.tp if self.sequence_parallel else 1


@dataclass(frozen=True)
class Stage:
    """The part of the model that one pipeline stage holds.

    With virtual pipelining, a pipeline rank holds several stages, called its chunks.

    Attributes:
        index: index among all stages of the model.
        rank: pipeline rank.
        chunk: index among the chunks of its rank.
        layers: indices of its layers.
        depths: number of its MTP depths (multi-token-prediction modules).
        head: whether it has the output layer and the loss.
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
        """Return a stage of a model without MTP, which holds the given layers.

        The stage has the embedding if it is the first of ``num_stages``; the last one has the final
        norm and the output layer.
        """
        first = index == 0
        last = index == num_stages - 1
        return cls(index, rank, chunk, tuple(layers), 0, first, last, last)

    def only(self, *layers: int) -> Stage:
        """Return this stage with these layers and nothing else."""
        return replace(self, layers=layers, depths=0, embedding=False, final_norm=False, head=False)


@dataclass(frozen=True)
class LayerBytes:
    """The memory that autograd needs for one layer.

    Attributes:
        kept: bytes kept from the forward to the backward pass.
        transient: further bytes at the peak of the layer's backward pass, all freed when this
            pass ends.
    """

    kept: int
    transient: int


def in_order(*parts: LayerBytes) -> LayerBytes:
    """Return the memory of several parts of a model that run one after another.

    The backward pass goes through the parts from the last to the first, and frees what each has
    kept.
    """
    transient = released = 0
    for part in reversed(parts):
        transient = max(transient, part.transient - released)
        released += part.kept
    return LayerBytes(released, transient)


def recomputed(
    layers: Sequence[LayerBytes],
    layer_input: int,
    *,
    size: int,
    limit: int,
    besides: Sequence[int] = (),
) -> list[LayerBytes]:
    """Return the memory of a stage's layers if the first ``limit`` of them are recomputed.

    They are recomputed in groups of ``size`` consecutive layers. A group keeps only the input of
    its first layer, ``layer_input`` bytes, and the bytes of its layers in ``besides``. The result
    has one item for each group, followed by the unchanged items of the other layers.
    """
    run_again = layers[:limit]
    others = layers[limit:]
    groups = []
    for first in range(0, len(run_again), size):
        again = in_order(*run_again[first : first + size])
        kept = layer_input + sum(besides[first : min(first + size, limit)])
        groups.append(LayerBytes(kept, again.kept + again.transient))
    return [*groups, *others]


def rms_norm(ranks: Ranks, rows: int, size: int, *, frozen: bool = False) -> int:
    """Return the bytes that an RMSNorm of ``[rows, size]`` keeps for backward, without its input.

    ``frozen`` says that the norm's weight is not trained.
    """
    statistics = rows * FP32
    if ranks.gpu:
        return statistics
    # A CPU keeps the normalized input for the weight's gradient; for 16-bit input, the fp32 input
    # instead.
    normed = 0 if frozen else rows * size * FP32
    return statistics + normed + (rows * size * (FP32 - ranks.width) if ranks.half else 0)


def layer_norm(rows: int) -> int:
    """Return the bytes that torch's LayerNorm keeps for backward, without its input.

    They are the means and reciprocal standard deviations of the rows.
    """
    return 2 * rows * FP32
