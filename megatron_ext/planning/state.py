"""The exact bytes that a rank keeps between steps, counted without building the model.

megatron-core puts the parameters of a chunk into one buffer, from the last to the first. With the
distributed optimizer, each parameter starts at a multiple of 64 elements, and each bucket ends at a
multiple of 128 and of the number of replicas. Each rank updates an equal share of each bucket. This
module repeats that arithmetic (``param_and_grad_buffer.py`` of megatron-core 0.16.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.planning.stages import FP32, Ranks, Summed
from megatron_ext.planning.weights import Weight


@dataclass(frozen=True)
class State(Summed):
    """The memory that one rank keeps between steps.

    Attributes:
        count: number of elements of the parameters, without padding.
        parameters, optimizer, average: bytes of the parameters, optimizer state, averaged weights.
        gradients: bytes of the gradients; if they are sharded, of the rank's shard and of the
            buckets that a backward pass fills.
        reduced: bytes of the unsharded gradients of all the rank's parameters, as they are reduced
            over the replicas.
        frozen: bytes of those ``parameters`` that are not trained.
        updated: number of elements that the rank's optimizer updates.
    """

    count: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    average: int = 0
    reduced: int = 0
    frozen: int = 0
    updated: int = 0

    @property
    def total(self) -> int:
        """Return the bytes of parameters, gradients, optimizer state and averages together."""
        return self.parameters + self.gradients + self.optimizer + self.average


@dataclass
class Bucket:
    """A range of a parameter buffer whose gradients are reduced at once; positions are elements.

    Attributes:
        start, end: positions in the buffer.
        spans: for each parameter of the bucket, its start and end in the buffer.
        matrices: for each parameter, whether ``--optimizer muon`` updates it.
    """

    start: int
    end: int
    spans: list[tuple[int, int]]
    matrices: list[bool]


def buckets(
    weights: Sequence[Weight], *, distributed: bool, replicas: int, bucket_size: int | None
) -> list[Bucket]:
    """Return the buckets of the buffer that holds the parameters of a module.

    Args:
        weights: the parameters in the order of the module.
        distributed: whether the optimizer's state is sharded over the ``replicas``.
        bucket_size: number of elements at which a bucket is closed; None for a single bucket.
    """
    alignment, ending = (64, math.lcm(replicas, 128)) if distributed else (1, 1)
    closed: list[Bucket] = []
    start = 0
    position = 0
    spans = list[tuple[int, int]]()
    matrices = list[bool]()

    def close(end: int) -> int:
        nonlocal start, spans, matrices
        end = _round_up(end, ending)
        closed.append(Bucket(start, end, spans, matrices))
        start = end
        spans = []
        matrices = []
        return end

    for weight in reversed(weights):
        position = _round_up(position, alignment)
        alone = weight.shared and distributed
        if alone and spans:
            position = close(position)
        spans.append((position, position + weight.numel))
        matrices.append(weight.matrix is not None)
        position += weight.numel
        if alone or (bucket_size is not None and position - start >= bucket_size):
            position = close(position)
    if spans:
        close(position)
    return closed


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def rank_state(
    config: RunConfig,
    ranks: Ranks,
    rank: int,
    chunks: Sequence[Sequence[Weight]],
    *,
    replica: int = 0,
    expert_replica: int = 0,
) -> State:
    """Return the memory that a rank keeps between steps for all its model chunks.

    Args:
        rank: pipeline rank.
        chunks: weights of each chunk.
        replica: index of the rank among the replicas of its dense parameters.
        expert_replica: index of the rank among the replicas of its experts.
    """
    optimizer = config.optimizer
    shards = config.optimizer.shards_gradients
    trained = [[weight for weight in chunk if not weight.frozen] for chunk in chunks]
    frozen = sum(weight.numel for chunk in chunks for weight in chunk if weight.frozen)
    total = State(count=frozen, parameters=frozen * ranks.width, frozen=frozen * ranks.width)
    in_fp32 = config.precision.accumulate_allreduce_grads_in_fp32
    size, filled = None, 0
    if rank == 0 or shards:
        numel = sum(weight.numel for chunk in trained for weight in chunk)
        size = optimizer.bucket_size(numel, ranks.dp * ranks.cp)
    for chunk in trained:
        filling = 0
        # Core uses a separate buffer for each dtype of parameters, and for experts.
        buffers: dict[tuple[bool, bool], list[Weight]] = {}
        for weight in chunk:
            buffers.setdefault((weight.expert, weight.fp8), []).append(weight)
        for (expert, fp8), weights in buffers.items():
            replicas = ranks.expert_dp if expert else ranks.dp * ranks.cp
            distributed = optimizer.use_distributed_optimizer
            laid = buckets(weights, distributed=distributed, replicas=replicas, bucket_size=size)
            parts = replicas if distributed else 1
            updated = [_share(x, expert_replica if expert else replica, parts) for x in laid]
            elements, touched, in_matrices = map(sum, zip(*updated, strict=True))
            reduced = laid[-1].end * (FP32 if in_fp32 else ranks.width)
            total += State(
                count=sum(weight.numel for weight in weights),
                parameters=laid[-1].end * (1 if fp8 else ranks.width),
                gradients=laid[-1].end // replicas * FP32 if shards else reduced,
                reduced=reduced,
                optimizer=_optimizer_bytes(
                    optimizer, elements, touched, in_matrices, half=ranks.half
                ),
                average=elements * FP32 if config.ema.ema_decay else 0,
                updated=elements,
            )
            if shards:
                width = FP32 if in_fp32 else ranks.width
                filling += width * _filled(laid, overlap=optimizer.overlap_grad_reduce)
        filled = max(filled, filling)
        if not shards:
            size = None  # only the first chunk has several buckets
    return total + State(gradients=filled)


def _filled(laid: Sequence[Bucket], *, overlap: bool) -> int:
    """Return the peak number of elements in the buckets that a backward pass fills or reduces.

    ``laid`` holds all buckets of a buffer whose gradients are sharded. A layer may fill two
    neighbouring buckets at once, and with ``overlap`` a third one is being reduced meanwhile. The
    last bucket is always counted: it may hold the word embedding, which an output layer or an MTP
    depth may share, and then fills first.
    """
    *sizes, last = [bucket.end - bucket.start for bucket in laid]
    count = 3 if overlap else 2
    return last + max((sum(sizes[i : i + count]) for i in range(len(sizes))), default=0)


def _share(bucket: Bucket, replica: int, replicas: int) -> tuple[int, int, int]:
    """Return three counts for the share of a bucket that one replica updates.

    They are its elements without padding, the parameters to which these belong, and those of the
    elements that are in matrices that Muon updates.
    """
    share = (bucket.end - bucket.start) // replicas
    low = bucket.start + (replica if replicas > 1 else 0) * share
    parts = [min(end, low + share) - max(start, low) for start, end in bucket.spans]
    mine = [part for part in parts if part > 0]
    own = zip(parts, bucket.matrices, strict=True)
    return sum(mine), len(mine), sum(part for part, matrix in own if matrix and part > 0)


def _optimizer_bytes(
    optimizer: OptimizerConfig, elements: int, touched: int, in_matrices: int, *, half: bool
) -> int:
    """Return the bytes of the optimizer state for the ``elements`` that a rank updates.

    The state consists of the moments and, with 16-bit parameters (``half``), the fp32 parameters.
    torch's Adam also keeps a float32 step count for each of the ``touched`` parameters. Muon has no
    second moment for the ``in_matrices`` elements of matrices. A trial tells what an optimizer of
    the user's own keeps.
    """
    main = FP32 if half else 0
    if optimizer.optimizer == "sgd":
        return elements * (main + (FP32 if optimizer.sgd_momentum else 0))
    if optimizer.optimizer == "custom":
        from megatron_ext.optim.custom import findings

        return elements * (main + findings(optimizer).width)
    names = optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype
    first, second = (FP32 if name == "fp32" else FP32 // 2 for name in names)
    squared = elements - (in_matrices if optimizer.optimizer == "muon" else 0)
    return elements * (main + first) + squared * second + touched * FP32
