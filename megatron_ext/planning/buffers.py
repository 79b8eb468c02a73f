"""Bytes that a rank keeps between steps: parameters, gradients, optimizer, averaged weights.

megatron-core lays the parameters of a chunk into one buffer, from the last to the first. With the
distributed optimizer each parameter starts at a multiple of 64 elements, each bucket ends at one
of 128 and of the number of replicas, and a rank updates its equal share of each bucket (core's
``param_and_grad_buffer.py``, as of 0.16.1). The same walk here makes the sums exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from megatron_ext.planning.contents import FP32, Ranks
from megatron_ext.planning.parameters import Weight

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
STEP_COUNTER = 4
"""torch's Adam keeps a float32 counter for each parameter."""


@dataclass(frozen=True)
class State:
    """Bytes on one rank.

    Attributes:
        count: elements of its parameters, padding excluded.
        parameters, gradients, optimizer, average: see the module.
        frozen: of the parameters, those that are not trained.
    """

    count: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    average: int = 0
    frozen: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.parameters + self.gradients + self.optimizer + self.average

    def __add__(self, other: State) -> State:
        return State(
            self.count + other.count,
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.average + other.average,
            self.frozen + other.frozen,
        )


@dataclass
class Bucket:
    """A stretch of a buffer, and where the parameters in it lie."""

    start: int
    end: int
    spans: list[tuple[int, int]]


def buckets(
    weights: Sequence[Weight], *, distributed: bool, replicas: int, bucket_size: int | None
) -> list[Bucket]:
    """Lay parameters into a buffer.

    Args:
        weights: of one buffer, in the order of the module.
        distributed: the optimizer's state is shared over the replicas.
        replicas: that share the buffer.
        bucket_size: elements that close a bucket; None for one bucket.
    """
    alignment = PARAMETER_ALIGNMENT if distributed else 1
    ending = math.lcm(replicas, BUCKET_ALIGNMENT) if distributed else 1
    found: list[Bucket] = []
    start, at, spans = 0, 0, list[tuple[int, int]]()

    def close(end: int) -> int:
        nonlocal start, spans
        end = _up(end, ending)
        found.append(Bucket(start, end, spans))
        start, spans = end, []
        return end

    for weight in reversed(weights):
        at = _up(at, alignment)
        alone = weight.shared and distributed
        if alone and spans:
            at = close(at)
        spans.append((at, at + weight.numel))
        at += weight.numel
        if alone or (bucket_size is not None and at - start >= bucket_size):
            at = close(at)
    if spans:
        close(at)
    return found


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def bucket_size(config: RunConfig, sizes: Ranks, count: int) -> int | None:
    """Elements of a bucket on the first pipeline rank's first chunk; see `layers.chunks`."""
    optimizer = config.optimizer
    if not optimizer.overlap_grad_reduce:
        return None
    if optimizer.ddp_num_buckets is not None:
        return count // optimizer.ddp_num_buckets
    return optimizer.ddp_bucket_size or max(40_000_000, 1_000_000 * sizes.dp * sizes.cp)


def chunk_state(
    config: RunConfig,
    sizes: Ranks,
    weights: Sequence[Weight],
    *,
    size: int | None = None,
    replica: int = 0,
    expert_replica: int = 0,
) -> State:
    """What a rank keeps of one model chunk.

    Args:
        config: the run.
        sizes: of the run.
        weights: of the chunk on this rank.
        size: elements of a bucket, None for one bucket.
        replica: index of the rank among those that share its dense parameters (data and context).
        expert_replica: the same for its experts.
    """
    trained = [weight for weight in weights if not weight.frozen]
    frozen = sum(weight.numel for weight in weights if weight.frozen)
    held = frozen * sizes.width
    total = State(count=frozen, parameters=held, frozen=held)
    # Core lays parameters of each type, and those of experts, into a buffer of their own.
    for expert, eight in product((False, True), (False, True)):
        group = [x for x in trained if (x.expert, x.eight) == (expert, eight)]
        ranks = sizes.expert_dp if expert else sizes.dp * sizes.cp
        index = expert_replica if expert else replica
        if group:
            total += _buffer_state(config, sizes, group, ranks, index, size)
    return total


def _buffer_state(
    config: RunConfig,
    sizes: Ranks,
    weights: Sequence[Weight],
    replicas: int,
    replica: int,
    size: int | None,
) -> State:
    distributed = config.optimizer.use_distributed_optimizer
    laid = buckets(weights, distributed=distributed, replicas=replicas, bucket_size=size)
    numel = laid[-1].end
    count = sum(weight.numel for weight in weights)
    updated = [_share(bucket, replica, replicas if distributed else 1) for bucket in laid]
    elements, pieces = sum(x for x, _ in updated), sum(x for _, x in updated)
    in_fp32 = config.precision.accumulate_allreduce_grads_in_fp32
    return State(
        count=count,
        parameters=numel * (1 if weights[0].eight else sizes.width),
        gradients=numel * (FP32 if in_fp32 else sizes.width),
        optimizer=_optimizer_bytes(config, sizes, elements, pieces),
        average=elements * FP32 if config.ema.ema_decay else 0,
    )


def _share(bucket: Bucket, replica: int, replicas: int) -> tuple[int, int]:
    """Elements, and parameters in part, of a bucket that a replica updates."""
    share = (bucket.end - bucket.start) // replicas if replicas > 1 else bucket.end - bucket.start
    low = bucket.start + (replica if replicas > 1 else 0) * share
    parts = [min(end, low + share) - max(start, low) for start, end in bucket.spans]
    mine = [part for part in parts if part > 0]
    return sum(mine), len(mine)


def _optimizer_bytes(config: RunConfig, sizes: Ranks, elements: int, pieces: int) -> int:
    """Moments, and in 16 bits the fp32 parameters, of what a rank updates."""
    main = FP32 if sizes.half else 0
    if config.optimizer.optimizer == "sgd":
        return elements * (main + (FP32 if config.optimizer.sgd_momentum else 0))
    return elements * (main + 2 * FP32) + pieces * STEP_COUNTER
