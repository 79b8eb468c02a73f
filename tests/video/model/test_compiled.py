"""Networks with compiled blocks give the outputs and gradients of the eager ones."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.parallel.context import ParallelContext
from tests.layers.test_compiled_layers import called, holders
from tests.ranks import ranks
from tests.video.model.mmdit.problem import Problem as MMDiTProblem
from tests.video.model.wan.problem import BIDIRECTIONAL
from tests.video.model.wan.problem import Problem as WanProblem
from tests.video.networks import Problem, Tensors, largest, one

TOLERANCES = {MMDiTProblem: 1e-6, WanProblem: 1e-12}
"""The rotary table of an MMDiT is float32 in any type of the model."""
NETWORKS = pytest.mark.parametrize("network", TOLERANCES, ids=["mmdit", "wan"])


def gradients(problem: Problem, context: ParallelContext) -> Tensors:
    chunk = one(problem, context, torch.float64)
    inputs = problem.inputs(dtype=torch.float64)
    if "timesteps" in inputs:
        inputs["timesteps"] = inputs["timesteps"].float()
    output = chunk(**inputs)
    wave = torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view_as(output)
    (output * wave).sum().backward()
    found = {name: p.grad for name, p in chunk.named_parameters() if p.grad is not None}
    return {"": output.detach(), **found}


def check(problem: Problem, context: ParallelContext) -> None:
    want = gradients(problem, context)
    with compiled_on_cpu():
        got = gradients(problem, context)
    assert got.keys() == want.keys()
    worst = {name: largest(got[name], want[name]) for name in want}
    assert max(worst.values()) < TOLERANCES[type(problem)], worst


@pytest.mark.parametrize(
    "problem",
    [
        MMDiTProblem(),
        WanProblem(),
        pytest.param(WanProblem(options=BIDIRECTIONAL), marks=pytest.mark.slow),
    ],
    ids=["mmdit", "wan", "wan twin"],
)
@ranks()
def test_outputs_and_gradients_are_those_of_the_eager_network(
    context: ParallelContext, problem: Problem
) -> None:
    check(problem, context)


@pytest.mark.slow
@NETWORKS
@pytest.mark.parametrize("sequence_parallel", [False, True])
@ranks(tp=2, cp=2)
def test_tensor_sequence_and_context_parallelism(
    context: ParallelContext, network: type[Problem], sequence_parallel: bool
) -> None:
    """The last context-parallel rank of an MMDiT holds no text."""
    check(network(sequence_parallel=sequence_parallel), context)  # type: ignore[call-arg]


@NETWORKS
@ranks()
def test_data_parallelism_is_told_of_every_weight_that_is_used(
    context: ParallelContext, network: type[Problem]
) -> None:
    problem = network()  # type: ignore[call-arg]
    chunk = one(problem, context)
    names = called(chunk)
    with compiled_on_cpu("eager"):
        chunk(**problem.inputs())
    assert names >= holders(chunk)
