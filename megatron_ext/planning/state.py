"""The exact bytes that a rank keeps between steps, counted without building the model.

megatron-core puts the parameters of a chunk into one buffer, from the last to the first. With the
distributed optimizer, each parameter starts at a multiple of 64 elements, and each bucket ends at a
multiple of 128 and of the number of replicas. Each rank updates an equal share of each bucket. This
module repeats that arithmetic (``param_and_grad_buffer.py`` of megatron-core 0.16.1).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.planning.stages import FP32, Ranks, Summed
from megatron_ext.planning.weights import ROUTED, Weight, bytes_of_frozen


@dataclass(frozen=True)
class State(Summed):
    """The memory that one rank keeps between steps.

    Attributes:
        count: number of elements of the parameters, without padding.
        parameters: bytes of the parameters; if they are sharded, of the rank's shard and of the
            weights that a pass gathers at once.
        optimizer, average: bytes of the optimizer state and of the averaged weights.
        gradients: bytes of the gradients; if they are sharded, of the rank's shard and of the
            buckets that a backward pass fills.
        reduced: bytes of the unsharded gradients of all the rank's parameters, as they are reduced
            over the replicas.
        gathered: bytes of the rank's trained parameters, as they are gathered from the replicas.
        frozen: bytes of those ``parameters`` that are not trained.
        updated: number of elements that the rank's optimizer updates on the device.
        hosted: number of elements that it updates on the host.
        host: bytes in host memory, which no number above counts: optimizer state, averages, and the
            buffers through which an update copies gradients and weights.
        host_optimizer: bytes of the optimizer state among them.
        setup: bytes of the weights before they are sharded, if all of them are there at a time;
            else 0.
    """

    count: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    average: int = 0
    reduced: int = 0
    gathered: int = 0
    frozen: int = 0
    updated: int = 0
    hosted: int = 0
    host: int = 0
    host_optimizer: int = 0
    setup: int = 0

    @property
    def total(self) -> int:
        """Return the device's bytes of parameters, gradients, optimizer state and averages."""
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
    draws_by_name: bool = True,
) -> State:
    """Return the memory that a rank keeps between steps for all its model chunks.

    Args:
        rank: pipeline rank.
        chunks: weights of each chunk.
        replica: index of the rank among the replicas of its dense parameters.
        expert_replica: index of the rank among the replicas of its experts.
        draws_by_name: whether weights are drawn after the model is built.
    """
    optimizer = config.optimizer
    shards = config.optimizer.shards_gradients
    trained = [[weight for weight in chunk if not weight.frozen] for chunk in chunks]
    frozen = [weight for chunk in chunks for weight in chunk if weight.frozen]
    held = sum(bytes_of_frozen(weight, config.lora, ranks.width) for weight in frozen)
    count = sum(weight.numel for weight in frozen)
    total = State(count=count, parameters=held, frozen=held)
    in_fp32 = config.precision.accumulate_allreduce_grads_in_fp32
    width = FP32 if in_fp32 else ranks.width
    size, filled, gathered = None, 0, 0
    pieces: dict[bool, list[int]] = {False: [], True: []}
    if rank == 0 or shards:
        numel = sum(weight.numel for chunk in trained for weight in chunk)
        size = optimizer.bucket_size(numel, ranks.dp * ranks.cp)
    for chunk in trained:
        filling = 0
        layers: dict[str, int] = {}
        # Core uses a separate buffer for each dtype of parameters, and for experts.
        buffers: dict[tuple[bool, bool], list[Weight]] = {}
        for weight in chunk:
            buffers.setdefault((weight.expert, weight.fp8), []).append(weight)
        for (expert, fp8), weights in buffers.items():
            replicas = ranks.expert_dp if expert else ranks.dp * ranks.cp
            distributed = optimizer.use_distributed_optimizer
            laid = buckets(weights, distributed=distributed, replicas=replicas, bucket_size=size)
            if optimizer.shards_weights:
                laid = _joined(laid, weights)
            parts = replicas if distributed else 1
            own = expert_replica if expert else replica
            updated = [_share(x, own, parts) for x in laid]
            if config.offload.optimizer_cpu_offload:
                pieces[expert] += [piece for x in laid for piece in _pieces(x, own, parts)]
            elements, touched, in_matrices = map(sum, zip(*updated, strict=True))
            reduced = laid[-1].end * width
            whole = laid[-1].end * (1 if fp8 else ranks.width)
            if optimizer.shards_weights and replicas > 1:
                for bucket, name in zip(laid, _units(weights), strict=True):
                    size_of = (bucket.end - bucket.start) * ranks.width
                    layers[name] = layers.get(name, 0) + size_of
            total += State(
                count=sum(weight.numel for weight in weights),
                parameters=whole // replicas if optimizer.shards_weights else whole,
                gathered=whole,
                gradients=laid[-1].end // replicas * FP32 if shards else reduced,
                reduced=reduced,
                optimizer=optimizer_bytes(
                    optimizer, elements, touched, in_matrices, half=ranks.half
                ),
                average=elements * FP32 if config.ema.ema_decay else 0,
                updated=elements,
            )
            if shards:
                # A layer's bucket is complete before the next layer fills its own.
                least = 1 if optimizer.shards_weights else _filled_by_a_layer(laid, weights)
                filling += width * _filled(laid, least + optimizer.overlap_grad_reduce)
        filled = max(filled, filling)
        if layers:
            names = dict.fromkeys(unit_of(weight.name) for weight in chunk)
            gathered = max(gathered, _at_once([(name, layers.get(name, 0)) for name in names]))
        if not shards:
            size = None  # only the first chunk has several buckets
    if config.offload.optimizer_cpu_offload:
        for weights_of_part in pieces.values():
            total += _moved(config, ranks, weights_of_part)
    if config.parallel.overlap_moe_expert_parallel_comm:
        gathered *= 2  # a forward and a backward pass at a time
    setup = total.count * ranks.width if _starts_whole(config, draws_by_name) else 0
    return total + State(gradients=filled, parameters=gathered, setup=setup)


def _starts_whole(config: RunConfig, draws_by_name: bool) -> bool:
    """Return whether all weights of a rank are there before they are sharded."""
    model = config.model
    several = config.parallel.pipeline_model_parallel_size > 1
    tied_stages = several and not model.untie_embeddings_and_output_weights
    at_once = model.use_cpu_initialization or not model.perform_initialization
    return config.optimizer.shards_weights and (at_once or tied_stages or not draws_by_name)


_LAYER = re.compile(r".*?\.\d+(?=\.)")
"""Matches the name of the layer to which a parameter belongs, such as "decoder.layers.3"."""


@lru_cache(maxsize=1 << 16)
def unit_of(name: str) -> str:
    """Return the name of the module whose sharded weights are gathered together with a parameter.

    It is a layer, or outside of layers the module that holds the parameter.
    """
    layer = _LAYER.match(name)
    return name.rpartition(".")[0] if layer is None else layer.group()


def _units(weights: Sequence[Weight]) -> list[str]:
    """Return the units of a buffer's parameters in the order of their buckets, as they change."""
    return [name for name, _ in groupby(unit_of(weight.name) for weight in reversed(weights))]


def _joined(laid: Sequence[Bucket], weights: Sequence[Weight]) -> list[Bucket]:
    """Join the buckets of each unit; ``laid`` has one for each of ``weights``."""
    joined: list[Bucket] = []
    pairs = zip(laid, reversed(weights), strict=True)
    for _, group in groupby(pairs, lambda pair: unit_of(pair[1].name)):
        own = [bucket for bucket, _ in group]
        spans = [span for bucket in own for span in bucket.spans]
        matrices = [matrix for bucket in own for matrix in bucket.matrices]
        joined.append(Bucket(own[0].start, own[-1].end, spans, matrices))
    return joined


def _at_once(units: Sequence[tuple[str, int]]) -> int:
    """Return the most bytes of sharded weights that a pass through a chunk gathers at a time.

    They are those of a unit and of the next one. A depth of multi-token prediction looks tokens up
    in the embedding in the meantime, and an output layer may use the embedding's weight.

    Args:
        units: names and bytes of the units, in the order of the module.
    """
    sizes = [size for _, size in units]
    table = max((size for name, size in units if "embedding" in name), default=0)
    pairs = [sum(sizes[i : i + 2]) for i in range(len(sizes))]
    depths = [
        table + pair
        for (name, _), pair in zip(units, pairs, strict=True)
        if name.startswith("mtp.")
    ]
    tied = [table + sizes[-1]] if table and units[-1][0] != "output_layer" else []
    return max([*pairs, *depths, *tied], default=0)


def _moved(config: RunConfig, ranks: Ranks, pieces: Sequence[int]) -> State:
    """Return what ``--optimizer-cpu-offload`` changes in the memory of a rank.

    ``pieces`` are the numbers of elements of each weight that an optimizer of megatron-core updates
    on the rank: it has one for experts, and one for all other weights.
    """
    from megatron_ext.optim.host_share import host_share

    flags = config.offload
    pieces = [piece for piece in pieces if piece]
    chosen = [pieces[index] for index in host_share(pieces, flags.optimizer_offload_fraction)]
    count = sum(chosen)
    state = optimizer_bytes(config.optimizer, count, len(chosen), 0, half=ranks.half)
    average = count * FP32 if config.ema.ema_decay and ranks.half else 0
    # A gradient, and the weight: rounded, if there is a float32 weight beside it.
    buffers = max(chosen, default=0) * (FP32 + ranks.width)
    if flags.overlap_cpu_optimizer_d2h_h2d:
        buffers *= 2
    return State(
        optimizer=-state,
        average=-average,
        updated=-count,
        hosted=count,
        host=state + average + buffers,
        host_optimizer=state,
    )


def _filled(laid: Sequence[Bucket], count: int) -> int:
    """Return the peak number of elements in the buckets that a backward pass fills or reduces.

    ``laid`` holds all buckets of a buffer whose gradients are sharded, of which ``count``
    neighbours have memory at a time: a layer may fill two, and with overlap a third one is being
    reduced meanwhile. The last bucket is always counted: it may hold the word embedding, which an
    output layer or an MTP depth may share, and then fills first.
    """
    *sizes, last = [bucket.end - bucket.start for bucket in laid]
    return last + max((sum(sizes[i : i + count]) for i in range(len(sizes))), default=0)


def _filled_by_a_layer(laid: Sequence[Bucket], weights: Sequence[Weight]) -> int:
    """Return the number of buckets that a layer fills at a time, at most.

    They are two, but for experts that compute together: the gradients of the second matrices of all
    of them come before those of their first ones, while another bucket waits for the shared expert.
    """
    names = (weight.name for weight in reversed(weights))
    routed = Counter[str]()
    for bucket in laid:
        held = [next(names) for _ in bucket.spans]
        routed.update({unit_of(name) for name in held if ROUTED in name})
    return max(2, 1 + max(routed.values(), default=0))


def _share(bucket: Bucket, replica: int, replicas: int) -> tuple[int, int, int]:
    """Return three counts for the share of a bucket that one replica updates.

    They are its elements without padding, the parameters to which these belong, and those of the
    elements that are in matrices that Muon updates.
    """
    parts = _pieces(bucket, replica, replicas)
    mine = [part for part in parts if part > 0]
    own = zip(parts, bucket.matrices, strict=True)
    return sum(mine), len(mine), sum(part for part, matrix in own if matrix and part > 0)


def _pieces(bucket: Bucket, replica: int, replicas: int) -> list[int]:
    """Return, for each parameter of a bucket, how many of its elements a replica updates."""
    share = (bucket.end - bucket.start) // replicas
    low = bucket.start + (replica if replicas > 1 else 0) * share
    return [max(0, min(end, low + share) - max(start, low)) for start, end in bucket.spans]


def optimizer_bytes(
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
