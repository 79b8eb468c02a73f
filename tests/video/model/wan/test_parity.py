"""Every layout against plain torch on one process: loss, flow and all gradients to 1e-5."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.layers.initialization import shards_of
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from tests.ranks import run_on_ranks
from tests.video.model.wan.problem import (
    BIDIRECTIONAL,
    CAUSAL,
    Problem,
    build,
    gathered_weights,
    largest,
)
from tests.video.model.wan.steps import (
    Step,
    Truth,
    dense_step,
    gradient_errors,
    streaming_step,
    truth,
)

TOLERANCE = 1e-5


def layout_of(sizes: dict[str, int]) -> Layout:
    tp, pp, cp, dp = (sizes.get(name, 1) for name in ("tp", "pp", "cp", "dp"))
    return Layout(
        world_size=tp * pp * cp * dp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
    )


def write_weights(context: ParallelContext, path: Path) -> None:
    torch.save(gathered_weights(build(Problem(), context)[1]), path)


class Truths:
    """One truth for all layouts that do the same; their ranks inherit it."""

    def __init__(self, folder: Path) -> None:
        path = folder / "weights"
        run_on_ranks(write_weights, layout_of({}), {"path": path})
        self.weights = torch.load(path)
        self.known: dict[Any, Truth] = {}

    def of(self, problem: Problem, *, streaming: bool) -> Truth:
        key = problem.rule, streaming, problem.frames, problem.timestep_per_frame
        if key not in self.known:
            self.known[key] = truth(problem, self.weights, streaming=streaming)
        return self.known[key]


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Truths:
    return Truths(tmp_path_factory.mktemp("truths"))


def compare(step: Step, want: Truth) -> None:
    for chunk in step.chunks:
        for shard in shards_of(chunk):
            assert torch.equal(shard.tensor, shard.cut(want.weights[shard.name])), shard.name
    assert step.loss == pytest.approx(want.loss, rel=TOLERANCE)
    if step.flow is not None:
        assert largest(step.flow, want.flow) < TOLERANCE
    errors = gradient_errors(step, want.gradients)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= TOLERANCE, f"{worst}: {errors[worst]:.2e}"


def check_dense(context: ParallelContext, problem: Problem, want: Truth) -> None:
    compare(dense_step(problem, context), want)


def check_streaming(context: ParallelContext, problem: Problem, want: Truth) -> None:
    compare(streaming_step(problem, context), want)


A2A = {"cp_comm_type": "a2a"}
LAYOUTS: dict[str, tuple[dict[str, int], bool, dict[str, Any]]] = {
    "one": ({}, False, {}),
    "tp2": ({"tp": 2}, False, {}),
    "tp2sp": ({"tp": 2}, True, {}),
    "cp2": ({"cp": 2}, False, {}),
    "cp2 a2a": ({"cp": 2}, False, A2A),
    "tp2 cp2": ({"tp": 2, "cp": 2}, False, {}),
    "tp2sp cp2 a2a recomputed": ({"tp": 2, "cp": 2}, True, {**A2A, "recompute_blocks": 9}),
    "tp2sp cp2 recomputed": ({"tp": 2, "cp": 2}, True, {"recompute_blocks": 1}),
    "cp4": ({"cp": 4}, False, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_criterion_24_layouts_stream_alike(truths: Truths, name: str) -> None:
    """The student: cache filled without gradient, each block again with it."""
    sizes, sequence_parallel, settings = LAYOUTS[name]
    options = dataclasses.replace(CAUSAL, **settings)
    problem = Problem(options=options, frames=18, sequence_parallel=sequence_parallel)
    arguments = {"problem": problem, "want": truths.of(problem, streaming=True)}
    run_on_ranks(check_streaming, layout_of(sizes), arguments)


PER_SAMPLE = {"timestep_per_frame": False}
DENSE: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "tp2sp": ({"tp": 2}, {"sequence_parallel": True, **PER_SAMPLE}, {}),
    "cp2 a2a": ({"cp": 2}, {}, A2A),
    "dp2": ({"dp": 2}, {}, {}),
    "pp2": ({"pp": 2}, {}, {}),
    "pp2 zb-h1": ({"pp": 2}, {"schedule": "zb-h1"}, {}),
    "tp2sp pp2 recomputed": (
        {"tp": 2, "pp": 2},
        {"sequence_parallel": True},
        {"recompute_blocks": 2},
    ),
    "cp2 pp2": ({"cp": 2, "pp": 2}, PER_SAMPLE, {}),
    "cp2 dp2": ({"cp": 2, "dp": 2}, {}, {}),
}


@pytest.mark.parametrize("name", DENSE)
def test_criterion_24_layouts_of_the_twin_train_alike(truths: Truths, name: str) -> None:
    """Critic and teacher, with pipeline stages."""
    sizes, fields, settings = DENSE[name]
    options = dataclasses.replace(BIDIRECTIONAL, **settings)
    problem = Problem(options=options, frames=6, **fields)
    arguments = {"problem": problem, "want": truths.of(problem, streaming=False)}
    run_on_ranks(check_dense, layout_of(sizes), arguments)


@pytest.mark.parametrize("name", ["tp2sp cp2 recomputed", "cp2"])
def test_criterion_24_the_masked_forward_trains_alike(truths: Truths, name: str) -> None:
    """The student on whole sequences, without a cache."""
    sizes, sequence_parallel, settings = LAYOUTS[name]
    options = dataclasses.replace(CAUSAL, **settings)
    problem = Problem(options=options, frames=18, sequence_parallel=sequence_parallel)
    arguments = {"problem": problem, "want": truths.of(problem, streaming=False)}
    run_on_ranks(check_dense, layout_of(sizes), arguments)
