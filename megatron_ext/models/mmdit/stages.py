"""Blocks of both kinds, dealt to pipeline stages by cost."""

from __future__ import annotations

from functools import lru_cache

from megatron_ext.config.mmdit_sizes import MMDiTSizes
from megatron_ext.errors import ConfigError


def stage_blocks(sizes: MMDiTSizes, num_stages: int, double_block_cost: float) -> list[range]:
    """The blocks of each stage.

    Args:
        sizes: of the model.
        num_stages: pipeline stages, virtual ones included.
        double_block_cost: time of a double block over that of a single one.

    Returns:
        For each stage a range over all blocks, double blocks first.

    Raises:
        ConfigError: fewer blocks than stages.
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
    """Contiguous parts, none empty, whose largest cost is smallest, and as even as can be then.

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
