"""Whether the ranks can be shared out; used by the configuration and by the rank grid."""

from __future__ import annotations


def rank_errors(
    world_size: int, *, tensor: int, pipeline: int, context: int, expert: int, expert_tensor: int
) -> list[str]:
    """What keeps a number of ranks from being laid out, one sentence each."""
    sizes = {
        "--tensor-model-parallel-size": tensor,
        "--pipeline-model-parallel-size": pipeline,
        "--context-parallel-size": context,
        "--expert-model-parallel-size": expert,
        "--expert-tensor-parallel-size": expert_tensor,
        "--world-size": world_size,
    }
    found = [
        f"`{name}` ({value}) must be at least 1." for name, value in sizes.items() if value < 1
    ]
    if found:
        return found
    products = {
        "tensor × pipeline × context": tensor * pipeline * context,
        "expert-tensor × expert × pipeline": expert_tensor * expert * pipeline,
    }
    refused: set[int] = set()
    for what, size in products.items():
        if world_size % size and size not in refused:
            refused.add(size)
            found.append(
                f"The number of ranks ({world_size}) must be divisible by {what} parallel size "
                f"({size}); start {-(-world_size // size) * size} ranks, or lower one of the "
                "sizes."
            )
    return found
