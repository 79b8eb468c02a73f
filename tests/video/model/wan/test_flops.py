"""Counted operations are those that torch counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.cost.flops import flops_of_pass
from tests.ranks import ranks
from tests.video.model.wan.problem import BIDIRECTIONAL, Problem, frames_of, new_cache
from tests.video.networks import one


def counted(chunk: Any, inputs: dict[str, Any]) -> tuple[float, float]:
    """Operations of a pass without gradient, ours and torch's."""
    ours = flops_of_pass(chunk, **inputs)
    # Torch counts no fused attention of a CPU.
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        chunk(**inputs)
    return ours, float(counter.get_total_flops())


@ranks()
def test_all_matrix_products_are_counted(context: ParallelContext) -> None:
    for problem in (
        Problem(),
        Problem(options=BIDIRECTIONAL),
        Problem(options=BIDIRECTIONAL, timestep_per_frame=False, batch=1, frames=5),
    ):
        ours, theirs = counted(one(problem, context), dict(problem.inputs()))
        assert ours == theirs


@ranks()
def test_keys_of_the_cache_count_and_its_text_does_not(context: ParallelContext) -> None:
    problem = dataclasses.replace(Problem(), frames=18)
    chunk, inputs = one(problem, context), problem.inputs()
    cache, seen = new_cache(chunk, problem), []
    for first in range(0, 18, 3):
        part = frames_of(inputs, first, 3)
        ours, theirs = counted(chunk, {**part, "cache": cache})
        assert ours == theirs, first
        seen.append(ours)
    # The first computes the text; then the window fills, until it is full.
    assert seen[1] < seen[2] < seen[3] == seen[4] == seen[5]
