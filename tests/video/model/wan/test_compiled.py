"""The video DiT with compiled blocks against plain torch."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.wan.options import VideoDiTOptions
from tests.layers.test_compiled_layers import called, holders
from tests.ranks import ranks
from tests.video.model.wan.problem import BIDIRECTIONAL, CAUSAL, Problem, largest, one


def gradients(problem: Problem, context: ParallelContext) -> dict[str, torch.Tensor]:
    chunk, inputs = one(problem, context, torch.float64), problem.inputs(dtype=torch.float64)
    flow = chunk(**inputs)
    (flow * problem.target().double()).sum().backward()
    found = {name: p.grad for name, p in chunk.named_parameters() if p.grad is not None}
    return {"": flow.detach(), **found}


@pytest.mark.parametrize("options", [CAUSAL, pytest.param(BIDIRECTIONAL, marks=pytest.mark.slow)])
@ranks()
def test_flow_and_gradients_are_those_of_the_eager_model(
    context: ParallelContext, options: VideoDiTOptions
) -> None:
    problem = Problem(options=options)
    want = gradients(problem, context)
    with compiled_on_cpu():
        got = gradients(problem, context)
    assert got.keys() == want.keys()
    worst = {name: largest(got[name], want[name]) for name in want}
    assert max(worst.values()) < 1e-12, worst


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@ranks(tp=2)
def test_tensor_parallel(context: ParallelContext, sequence_parallel: bool) -> None:
    problem = Problem(sequence_parallel=sequence_parallel)
    want = gradients(problem, context)
    with compiled_on_cpu():
        got = gradients(problem, context)
    worst = {name: largest(got[name], want[name]) for name in want}
    assert max(worst.values()) < 1e-12, worst


@ranks()
def test_data_parallelism_is_told_of_every_weight_that_is_used(context: ParallelContext) -> None:
    problem = Problem()
    chunk = one(problem, context)
    names = called(chunk)
    with compiled_on_cpu("eager"):
        chunk(**problem.inputs())
    assert names >= holders(chunk)
