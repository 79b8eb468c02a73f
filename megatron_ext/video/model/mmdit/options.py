"""How an MMDiT of given sizes starts, is recomputed, and is dealt to pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_ext.errors import ConfigError
from megatron_ext.layers.attention import GATHER
from megatron_ext.video.config.mmdit import MMDiTSizes


@dataclass(frozen=True)
class MMDiTOptions:
    """Options of an MMDiT that change no shape of a parameter.

    Attributes:
        adaln_zero: modulations and the last layer start at zero (DiT, arXiv:2212.09748), so that
            every block begins as the identity and the model predicts zero. Training from scratch
            wants this; Open-Sora starts from the weights of FLUX instead.
        recompute_double_blocks: the first so many double blocks of the model keep only their
            inputs, and are run again in the backward pass; more than there are means all.
        recompute_single_blocks: the same for single blocks.
        cp_comm_type: how context-parallel ranks attend to the whole sequence: ``all_gather`` (or
            ``p2p``) collects keys and values, ``a2a`` trades heads for sequence.
        double_block_cost: time of a double block over that of a single one, by which blocks are
            dealt to pipeline stages. Both multiply every token by 12 h^2 weights (mlp_ratio 4) and
            attend alike, so it is 1; measure it, or take 2.4, the ratio of their parameters, to
            balance memory.

    Raises:
        ConfigError: a value is out of its range.
    """

    adaln_zero: bool = False
    recompute_double_blocks: int = 0
    recompute_single_blocks: int = 0
    cp_comm_type: str = "all_gather"
    double_block_cost: float = 1.0

    def __post_init__(self) -> None:
        for name in ("recompute_double_blocks", "recompute_single_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"`{name}` ({getattr(self, name)}) must be 0 or more; 0 recomputes nothing."
                )
        if self.cp_comm_type not in (*GATHER, "a2a"):
            raise ConfigError(
                f"`cp_comm_type` ({self.cp_comm_type}) must be p2p, all_gather or a2a."
            )
        if not 0 < self.double_block_cost < float("inf"):
            raise ConfigError(
                f"`double_block_cost` ({self.double_block_cost}) must be a positive number; 1 if "
                "it was not measured."
            )


def stage_blocks(sizes: MMDiTSizes, num_stages: int, double_block_cost: float) -> list[range]:
    """Deal the blocks, double ones first, to stages by cost.

    Args:
        num_stages: pipeline stages, virtual ones included.
        double_block_cost: time of a double block over that of a single one.

    Returns:
        A range of block numbers for each stage.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    if num_stages > sizes.num_blocks:
        raise ConfigError(
            f"the pipeline has {num_stages} stages, but the model only {sizes.num_blocks} blocks "
            f"({sizes.num_double_blocks} double, {sizes.num_single_blocks} single); use a smaller "
            "`--pipeline-model-parallel-size`."
        )
    costs = [double_block_cost] * sizes.num_double_blocks + [1.0] * sizes.num_single_blocks
    return list(_deal(tuple(costs), num_stages))


@lru_cache(maxsize=16)
def _deal(costs: tuple[float, ...], num_stages: int) -> tuple[range, ...]:
    """Deal into contiguous parts, none empty, whose largest cost is smallest, as evenly as can be.

    Dynamic programming over the number of blocks dealt: ``best[i]`` is the (largest cost, sum of
    squares) of the best way to deal the first i blocks, with its ends of stages.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(1, num_stages + 1):
        last_end = len(costs) - (num_stages - stage)
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage, last_end + 1):
            longer[end] = min(
                (max(largest, cost), squares + cost**2, (*ends, end))
                for start, (largest, squares, ends) in best.items()
                if start < end
                for cost in (sums[end] - sums[start],)
            )
        best = longer
    ends = best[len(costs)][2]
    return tuple(range(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True))
