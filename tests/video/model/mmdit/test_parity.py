"""Every layout against plain torch on one process: loss and all gradients to 1e-5 relative.

Ranks hold unequal numbers of image tokens wherever the sequence is cut: the first holds all text.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.layers.initialization import shards_of
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from megatron_ext.video.model.mmdit.options import MMDiTOptions
from tests.ranks import run_on_ranks
from tests.video.model.mmdit.names import Tensors
from tests.video.model.mmdit.problem import (
    Problem,
    build,
    gathered_weights,
    gradient_errors,
    train_step,
    truth,
)

TOLERANCE = 1e-5
NAMED = (
    "q_layernorm k_layernorm modulation.weight time_in pooled_in guidance_in cond_in "
    "linear_qkv linear_proj.bias final_layer"
).split()
"""Of which at least one parameter must have been compared: the delicate ones."""


@dataclass(frozen=True)
class Truth:
    """What plain torch gives for the weights that the names decide."""

    weights: Tensors
    loss: float
    gradients: Tensors


class Truths:
    """One truth for all layouts that train on the same data; their ranks inherit it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[Any, Truth] = {}

    def of(self, problem: Problem) -> Truth:
        data = problem.num_text, problem.mask
        if data not in self.known:
            path = self.folder / "weights"
            run_on_ranks(write_weights, layout_of({}), {"path": path})
            weights = torch.load(path)
            self.known[data] = Truth(weights, *truth(problem, weights))
        return self.known[data]


def write_weights(context: ParallelContext, path: Path) -> None:
    torch.save(gathered_weights(build(Problem(), context)[1]), path)


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Truths:
    return Truths(tmp_path_factory.mktemp("truths"))


def check(context: ParallelContext, problem: Problem, want: Truth) -> None:
    step = train_step(problem, context)
    for chunk in step.chunks:
        for shard in shards_of(chunk):
            assert torch.equal(shard.tensor, shard.cut(want.weights[shard.name])), shard.name
    assert step.loss == pytest.approx(want.loss, rel=TOLERANCE)
    assert want.gradients.keys() == want.weights.keys()
    assert all(any(name in key for key in want.gradients) for name in NAMED)
    errors = gradient_errors(step, want.gradients)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= TOLERANCE, f"{worst}: {errors[worst]:.2e}"


A2A = MMDiTOptions(cp_comm_type="a2a")
SP: dict[str, Any] = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp2": ({"tp": 2}, {}),
    "tp4": ({"tp": 4}, {}),
    "tp2sp": ({"tp": 2}, SP),
    "tp2sp odd text": ({"tp": 2}, {**SP, "num_text": 10}),
    "pp2": ({"pp": 2}, {}),
    "pp4": ({"pp": 4}, {}),
    "pp2 zb-h1": ({"pp": 2}, {"schedule": "zb-h1"}),
    "pp2 interleaved": ({"pp": 2, "vpp": 2}, {"schedule": "interleaved"}),
    "pp2 zb-v": ({"pp": 2, "vpp": 2}, {"schedule": "zb-v"}),
    "cp2": ({"cp": 2}, {}),
    "cp2 a2a": ({"cp": 2}, {"options": A2A}),
    "cp4": ({"cp": 4}, {}),
    "cp4 a2a": ({"cp": 4}, {"options": A2A}),
    "dp2": ({"dp": 2}, {}),
    "tp2 pp2": ({"tp": 2, "pp": 2}, {}),
    "tp2sp pp2": ({"tp": 2, "pp": 2}, SP),
    "cp2 dp2": ({"cp": 2, "dp": 2}, {}),
    "tp2 cp2 pp2": ({"tp": 2, "cp": 2, "pp": 2}, {}),
    "tp2sp cp2 pp2 a2a": ({"tp": 2, "cp": 2, "pp": 2}, {**SP, "options": A2A}),
}


def layout_of(sizes: dict[str, int], schedule: str | None = None) -> Layout:
    tp, pp, cp, dp = (sizes.get(name, 1) for name in ("tp", "pp", "cp", "dp"))
    return Layout(
        world_size=tp * pp * cp * dp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=sizes.get("vpp"),
        v_shape=schedule == "zb-v",
    )


def run(truths: Truths, name: str, **changes: Any) -> None:
    sizes, settings = LAYOUTS[name]
    problem = dataclasses.replace(Problem(**settings), **changes)
    arguments = {"problem": problem, "want": truths.of(problem)}
    run_on_ranks(check, layout_of(sizes, problem.schedule), arguments)


@pytest.mark.parametrize("name", LAYOUTS)
def test_criterion_15_layouts_train_alike(truths: Truths, name: str) -> None:
    run(truths, name)


@pytest.mark.parametrize("name", ["cp2", "cp2 a2a", "cp4", "cp2 dp2", "tp2sp cp2 pp2 a2a"])
def test_criterion_16_a_mask_may_sit_on_one_rank(truths: Truths, name: str) -> None:
    """The first half of the ranks' tokens counts nothing (guards trap 6)."""
    run(truths, name, mask="last frame")


@pytest.mark.parametrize("name", ["cp4", "cp4 a2a"])
def test_criterion_16_a_rank_may_hold_text_alone(truths: Truths, name: str) -> None:
    run(truths, name, num_text=16, mask="all")


def test_criterion_18_recomputation_on_ranks(truths: Truths) -> None:
    options = MMDiTOptions(recompute_double_blocks=1, recompute_single_blocks=100)
    run(truths, "tp2sp cp2 pp2 a2a", options=options)
