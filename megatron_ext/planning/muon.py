"""Counts the operations of Muon's update, and the bytes that a rank sends during this update.

A fused matrix, such as that of queries, keys and values, is counted as one, so the operations are
an upper bound. Ranks that share the optimizer's state divide the work; otherwise each replica
orthogonalizes all of its matrices.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.planning.kernels import Phase, Work
from megatron_ext.planning.network import Volume, ring
from megatron_ext.planning.stages import FP32, Ranks
from megatron_ext.planning.weights import Weight

HALF = 2


def _dealt(flags: OptimizerConfig, ranks: Ranks, weight: Weight) -> float:
    """Return the fraction of a rank's matrices that the rank orthogonalizes itself.

    With the distributed optimizer, the replicas of ``weight`` divide the matrices. Experts have
    another number of replicas than other weights. Without that optimizer the fraction is 1.
    """
    if not flags.use_distributed_optimizer:
        return 1.0
    return 1 / (ranks.expert_dp if weight.expert else ranks.dp * ranks.cp)


def _sharers(weight: Weight) -> int:
    """Return the number of tensor-parallel ranks among which a matrix is split."""
    assert weight.matrix is not None
    rows, columns = weight.matrix
    return max(1, rows * columns // weight.numel)


def _width(flags: OptimizerConfig) -> int:
    return HALF if flags.muon_fp32_matmul_prec == "medium" else FP32


def muon_work(flags: OptimizerConfig, ranks: Ranks, weights: Iterable[Weight]) -> list[Work]:
    """Return the matrix products of Muon's update for the ``weights`` that a rank holds.

    One Newton-Schulz iteration on a matrix ``[m, n]`` with m <= n has three products, which take
    ``4 m^2 n + 2 m^3`` operations together.
    """
    flops = kernels = 0.0
    for weight in weights:
        if weight.matrix is not None and not weight.frozen:
            short, long = sorted(weight.matrix)
            dealt = _dealt(flags, ranks, weight) * flags.muon_num_ns_steps
            together = 1 if flags.muon_tp_mode == "duplicated" else _sharers(weight)
            flops += dealt * (4 * short**2 * long + 2 * short**3) / together
            kernels += dealt * 3
    if not flops:
        return []
    return [Work("optimizer", Phase.UPDATE, flops=flops, kernels=kernels, width=_width(flags))]


def muon_volume(flags: OptimizerConfig, ranks: Ranks, weights: Iterable[Weight]) -> Volume:
    """Return the bytes that a rank sends in an update, for matrices that several ranks share.

    Replicas exchange momenta and the orthogonalized results. Tensor-parallel ranks exchange parts
    of momenta or sums of Gram matrices, depending on ``--muon-tp-mode``.
    """
    data = tensor = 0.0
    for weight in weights:
        if weight.matrix is None or weight.frozen:
            continue
        dealt = _dealt(flags, ranks, weight)
        sharers = _sharers(weight)
        data += 2 * dealt * (1 - dealt) * weight.numel
        if sharers > 1 and flags.muon_tp_mode == "duplicated":
            tensor += dealt * (sharers - 1) * weight.numel
        elif sharers > 1 and flags.muon_tp_mode == "distributed":
            gram = min(weight.matrix) ** 2
            tensor += dealt * flags.muon_num_ns_steps * 2 * ring(sharers) * gram
    return Volume(tensor=tensor * _width(flags), data=data * _width(flags))
