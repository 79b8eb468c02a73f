"""Every layout of every network against plain torch on one process: loss and all gradients.

Ranks of an MMDiT hold unequal numbers of image tokens wherever the sequence is cut: the first
holds all text.
"""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.joint_blocks import JointOptions
from tests.ranks import on_ranks, run_on_ranks
from tests.video.networks.harness import (
    Problem,
    Truth,
    check_step,
    layout_of,
    train_step,
    truth,
    write_weights,
)
from tests.video.networks.mmdit.problem import Problem as MMDiTProblem
from tests.video.networks.wan.problem import ALONE, BIDIRECTIONAL, CAUSAL, streaming_step
from tests.video.networks.wan.problem import Problem as WanProblem

TOLERANCE = 1e-5
DELICATE = (
    "q_layernorm k_layernorm modulation.weight time_in pooled_in guidance_in cond_in "
    "linear_qkv linear_proj.bias final_layer"
).split()
"""Parameters of the MMDiT of which at least one of each kind must have been compared."""
SP: dict[str, Any] = {"sequence_parallel": True}
A2A: dict[str, Any] = {"options": JointOptions(cp_comm_type="a2a")}
RECOMPUTED = JointOptions(cp_comm_type="a2a", recompute_double_blocks=1, recompute_single_blocks=99)
LAST = {"mask": "last frame"}
"""Options under which the mask sits on one rank, so that the others' tokens count nothing."""
TEXT = {"num_text": 16, "mask": "all"}
"""Options under which a rank holds text alone."""


def wan(options: Any, changes: dict[str, Any], **fields: Any) -> WanProblem:
    return WanProblem(options=dataclasses.replace(options, **changes), **fields)


def streamed(changes: dict[str, Any], **fields: Any) -> WanProblem:
    """Return the student, which fills a cache and then runs each block again with gradient."""
    return wan(CAUSAL, changes, frames=18, streaming=True, **fields)


def alone(changes: dict[str, Any], **fields: Any) -> WanProblem:
    """Return the student whose first frame is a block of its own."""
    return wan(ALONE, changes, frames=10, streaming=True, **fields)


def masked(changes: dict[str, Any], **fields: Any) -> WanProblem:
    return wan(CAUSAL, changes, frames=18, **fields)


def twin(changes: dict[str, Any], **fields: Any) -> WanProblem:
    return wan(BIDIRECTIONAL, changes, frames=6, **fields)


WAN_A2A, WHOLE = {"cp_comm_type": "a2a"}, {"timestep_per_frame": False}
ALL_BLOCKS = {"recompute_blocks": 9}
FOUR, EIGHT = {"tp": 2, "cp": 2}, {"tp": 2, "cp": 2, "pp": 2}
CASES: dict[str, tuple[dict[str, int], Problem]] = {
    "mmdit one, last frame": ({}, MMDiTProblem(**LAST)),
    "mmdit tp2": ({"tp": 2}, MMDiTProblem()),
    "mmdit tp4": ({"tp": 4}, MMDiTProblem()),
    "mmdit tp2sp": ({"tp": 2}, MMDiTProblem(**SP)),
    "mmdit tp2sp odd text": ({"tp": 2}, MMDiTProblem(**SP, num_text=10)),
    "mmdit pp2": ({"pp": 2}, MMDiTProblem()),
    "mmdit pp4": ({"pp": 4}, MMDiTProblem()),
    "mmdit pp2 zb-h1": ({"pp": 2}, MMDiTProblem(schedule="zb-h1")),
    "mmdit pp2 interleaved": ({"pp": 2, "vpp": 2}, MMDiTProblem(schedule="interleaved")),
    "mmdit pp2 zb-v": ({"pp": 2, "vpp": 2}, MMDiTProblem(schedule="zb-v")),
    "mmdit cp2": ({"cp": 2}, MMDiTProblem()),
    "mmdit cp2 a2a": ({"cp": 2}, MMDiTProblem(**A2A)),
    "mmdit cp4": ({"cp": 4}, MMDiTProblem()),
    "mmdit cp4 a2a": ({"cp": 4}, MMDiTProblem(**A2A)),
    "mmdit dp2": ({"dp": 2}, MMDiTProblem()),
    "mmdit tp2 pp2": ({"tp": 2, "pp": 2}, MMDiTProblem()),
    "mmdit tp2sp pp2": ({"tp": 2, "pp": 2}, MMDiTProblem(**SP)),
    "mmdit cp2 dp2": ({"cp": 2, "dp": 2}, MMDiTProblem()),
    "mmdit tp2 cp2 pp2": (EIGHT, MMDiTProblem()),
    "mmdit tp2sp cp2 pp2 a2a": (EIGHT, MMDiTProblem(**SP, **A2A)),
    "mmdit tp2sp cp2 pp2 a2a recomputed": (EIGHT, MMDiTProblem(**SP, options=RECOMPUTED)),
    "mmdit cp2, last frame": ({"cp": 2}, MMDiTProblem(**LAST)),
    "mmdit cp2 a2a, last frame": ({"cp": 2}, MMDiTProblem(**LAST, **A2A)),
    "mmdit cp4, last frame": ({"cp": 4}, MMDiTProblem(**LAST)),
    "mmdit cp2 dp2, last frame": ({"cp": 2, "dp": 2}, MMDiTProblem(**LAST)),
    "mmdit tp2sp cp2 pp2 a2a, last frame": (EIGHT, MMDiTProblem(**SP, **A2A, **LAST)),
    "mmdit cp4, text alone": ({"cp": 4}, MMDiTProblem(**TEXT)),
    "mmdit cp4 a2a, text alone": ({"cp": 4}, MMDiTProblem(**TEXT, **A2A)),
    "wan streamed one": ({}, streamed({})),
    "wan streamed tp2": ({"tp": 2}, streamed({})),
    "wan streamed tp2sp": ({"tp": 2}, streamed({}, **SP)),
    "wan streamed cp2": ({"cp": 2}, streamed({})),
    "wan streamed cp2 a2a": ({"cp": 2}, streamed(WAN_A2A)),
    "wan streamed tp2 cp2": ({"tp": 2, "cp": 2}, streamed({})),
    "wan streamed tp2sp cp2 a2a recomputed": (FOUR, streamed({**WAN_A2A, **ALL_BLOCKS}, **SP)),
    "wan streamed tp2sp cp2 recomputed": (FOUR, streamed({"recompute_blocks": 1}, **SP)),
    "wan streamed cp4": ({"cp": 4}, streamed({})),
    "wan first frame alone one": ({}, alone({})),
    "wan first frame alone tp2": ({"tp": 2}, alone({})),
    "wan first frame alone cp2": ({"cp": 2}, alone({})),
    "wan first frame alone tp2sp cp2 a2a": (FOUR, alone(WAN_A2A, **SP)),
    "wan masked cp2": ({"cp": 2}, masked({})),
    "wan masked tp2sp cp2 recomputed": ({"tp": 2, "cp": 2}, masked({"recompute_blocks": 1}, **SP)),
    "wan twin tp2sp": ({"tp": 2}, twin({}, **SP, **WHOLE)),
    "wan twin cp2 a2a": ({"cp": 2}, twin(WAN_A2A)),
    "wan twin dp2": ({"dp": 2}, twin({})),
    "wan twin pp2": ({"pp": 2}, twin({})),
    "wan twin pp2 zb-h1": ({"pp": 2}, twin({}, schedule="zb-h1")),
    "wan twin tp2sp pp2 recomputed": ({"tp": 2, "pp": 2}, twin({"recompute_blocks": 2}, **SP)),
    "wan twin cp2 pp2": ({"cp": 2, "pp": 2}, twin({}, **WHOLE)),
    "wan twin cp2 dp2": ({"cp": 2, "dp": 2}, twin({})),
}


@pytest.fixture(scope="module")
def truth_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Truth]:
    """Return a function that gives one truth for all layouts, which their ranks inherit."""
    path = tmp_path_factory.mktemp("truths") / "weights"

    @cache
    def of(problem: Any) -> Truth:
        on_ranks(write_weights, {}, problem=problem, path=path)
        return truth(problem, torch.load(path))

    return lambda problem: of(problem.on_one_rank())


def check(context: ParallelContext, problem: Any, want: Truth) -> None:
    step = streaming_step if isinstance(problem, WanProblem) and problem.streaming else train_step
    check_step(step(problem, context), want, TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_layouts_train_as_plain_torch(truth_of: Callable[[Any], Truth], name: str) -> None:
    sizes, problem = CASES[name]
    want = truth_of(problem)
    if isinstance(problem, MMDiTProblem):
        assert all(any(part in key for key in want.gradients) for part in DELICATE)
    run_on_ranks(check, layout_of(sizes, problem.schedule), {"problem": problem, "want": want})
