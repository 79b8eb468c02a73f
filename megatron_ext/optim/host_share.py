"""Which weights the host updates; `optim.offload` moves their state, and plans count it."""

from __future__ import annotations

from collections.abc import Sequence


def host_share(sizes: Sequence[int], fraction: float) -> set[int]:
    """Return the indices of the weights that the host updates, for weights of these sizes.

    Their sizes add up to at least ``fraction`` of the sum, whatever the order of the sizes, and
    exceed it by less than the size of the smallest weight that is not chosen.
    """
    goal = fraction * sum(sizes)
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    chosen = set[int]()
    taken = 0
    for index in order:
        if taken + sizes[index] <= goal:
            chosen.add(index)
            taken += sizes[index]
    if taken < goal:
        # Each of the others is larger than what is missing, or it would have been chosen.
        last = next(index for index in reversed(order) if index not in chosen)
        taken += sizes[last]
        chosen.add(last)
        for index in order:
            if index in chosen and taken - sizes[index] >= goal:
                chosen.remove(index)
                taken -= sizes[index]
    return chosen
