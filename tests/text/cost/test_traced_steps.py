"""Planned kernels and bytes beside those of whole steps that tests/gpu_proof traced.

Its file of budgets holds kernels, and bytes per weight or token, of steps of a Llama 3b with two
layers at 8192 tokens on fake CUDA tensors, with the kernels that torch's compiler makes.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.gpu_setup import LLAMAS
from megatron_ext.device.gpus import GPUS
from megatron_ext.planning.budget import Line, budget
from megatron_ext.planning.step_time import estimate
from megatron_ext.text.cost.network import GptNetwork
from tests.training_runs import config_of

BUDGETS = Path(__file__).parents[2] / "gpu_proof" / "budget.json"
SIZES = dataclasses.replace(LLAMAS["3b"], layers=2)
LENGTH = 8192
EIGHT = "--fp8-format hybrid --fp8-recipe"
STEPS = {"bf16": "", **{f"fp8 {x}": f"{EIGHT} {x}" for x in ("delayed", "tensorwise", "rowwise")}}


def planned(words: str) -> dict[str, Line]:
    flags = f"{' '.join(SIZES.flags(LENGTH, 1))} --padded-vocab-size {SIZES.vocab} --bf16 {words}"
    network = GptNetwork.of(config_of(flags, device="cuda"))
    return {line.kind: line for line in budget(estimate(network, GPUS["H200"]))}


def traced(name: str) -> dict[str, tuple[float, float]]:
    """Return kernels and bytes of each class in a step."""
    rows = json.loads(BUDGETS.read_text(encoding="utf-8"))["steps"][name]
    units = dict.fromkeys(("optimizer", "plumbing", "communication"), SIZES.parameters)
    return {kind: (x[0], x[1] * units.get(kind, LENGTH)) for kind, x in rows.items()}


@pytest.mark.parametrize("name", STEPS)
def test_bytes_of_a_step(name: str) -> None:
    plan, found = planned(STEPS[name]), traced(name)
    # A compiled rotation reads both halves of a head twice, the second time from a cache.
    cached = 1.05 * (SIZES.heads + 2 * SIZES.groups) * SIZES.head_size * 2 * LENGTH * SIZES.layers
    assert plan["pointwise"].num_bytes == pytest.approx(found["pointwise"][1] - cached, rel=0.03)
    assert plan["logits"].num_bytes == pytest.approx(found["logits"][1], rel=0.01)
    assert plan["optimizer"].num_bytes == pytest.approx(found["optimizer"][1], rel=0.01)
    # What sums up 8-bit gradients is in another class of the trace.
    sums = 0.0 if name == "bf16" else plan["weight gradients"].num_bytes
    assert plan["plumbing"].num_bytes + sums == pytest.approx(found["plumbing"][1], rel=0.1)
    if name != "bf16":
        assert plan["casts"].num_bytes == pytest.approx(found["casts"][1], rel=0.1)


@pytest.mark.parametrize("name", STEPS)
def test_kernels_of_a_step(name: str) -> None:
    plan, found = planned(STEPS[name]), traced(name)
    assert plan["linear"].kernels == found["linear"][0]
    assert plan["head"].kernels == found["head"][0]
    assert plan["gaps"].kernels == pytest.approx(sum(count for count, _ in found.values()), rel=0.2)
