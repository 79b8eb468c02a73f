"""Defects that are planted on purpose are reported, so that the other tests can fail."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.layers.compiled import Compiled, compiled
from megatron_ext.layers.linear import RowParallelLinear
from megatron_ext.text.step import gpt_forward_step
from megatron_ext.text.task import GPT
from tests.gpu_proof import budget
from tests.gpu_proof.cases import H, hidden
from tests.gpu_proof.compiler import compiled_graphs
from tests.gpu_proof.fake_cuda import CAPABILITY
from tests.gpu_proof.steps import LAYERS, built, flags
from tests.gpu_proof.test_kernels import CASES, broken_limits, compiled_functions
from tests.gpu_proof.test_steps import OUTSIDE_OF_LAYERS, READ, unexpected

ON_H200 = pytest.mark.skipif(CAPABILITY != 90, reason="the budgets are those of an H200")
pytestmark = pytest.mark.usefixtures("fake_tensors")

RESIDUAL = next(case for case in CASES if case.name == "residual")


def test_a_further_kernel_and_its_traffic_are_reported() -> None:
    @compiled
    def added(x: Tensor, _bias: None, residual: Tensor, *_more: object) -> Tensor:
        total = x + residual
        return total / total.abs().amax(0, keepdim=True)  # its own pass over all tokens

    planted = dataclasses.replace(RESIDUAL, function=added)
    kernels, *traffic = broken_limits(planted)
    assert kernels.startswith("residual forward: 4 kernels for 1")
    assert traffic[0].startswith("residual forward: traffic of 6.0")


def test_spilled_registers_are_reported() -> None:
    """Sines of large arguments use a stack, which no case but the rotary table's allows."""

    @compiled
    def sines(x: Tensor, *_more: object) -> Tensor:
        return x.float().sin()

    planted = dataclasses.replace(RESIDUAL, function=sines)
    assert any("no configuration of" in sentence for sentence in broken_limits(planted))


def test_a_compiled_function_without_a_case_is_found() -> None:
    named = compiled_functions().values()
    for name in ("layers.norms.normed", "losses.softmax_kernels.statistics"):
        assert f"megatron_ext.{name}" in named
    assert len(named) >= len({id(case.function) for case in CASES})


def test_fake_tensors_have_no_values() -> None:
    """A test that read one would not be about a GPU."""
    with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
        hidden()[0, 0, H - 1].item()


def test_waits_of_the_host_are_reported() -> None:
    """A step that reads its loss, copies a number to the device, and pins memory in a layer."""

    def asking(config: RunConfig, batch: Any, model: torch.nn.Module, counts: Any) -> Any:
        hidden, loss = gpt_forward_step(config, batch, model, counts)
        scale = torch.tensor([1.0], device="cuda")
        torch.empty(1).pin_memory()
        if hidden.float().mean().item() > 0:  # always, on fake tensors
            hidden = hidden * scale
        return hidden, loss

    task = dataclasses.replace(GPT, forward_step=asking)
    with built(flags(size="tiny", length=128), task=task) as step:
        step.take()
        trace = step.take()
    place = "megatron_ext/schedules/runtime.py:forward"
    assert unexpected(trace.waits, [READ]) == [
        f"_to_copy at {place}",
        f"_local_scalar_dense at {place}",
    ]
    assert unexpected(trace.pinned, OUTSIDE_OF_LAYERS) == [place]


def test_what_a_capture_forbids_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that reads a value, and sends one from pageable and one from pinned memory."""
    forward = RowParallelLinear.forward

    def asking(self: RowParallelLinear, x: Tensor) -> Any:
        scale = torch.tensor([1.0], device="cuda")
        sent = torch.ones(1).pin_memory().to("cuda", non_blocking=True)
        return forward(self, x * scale * sent * float(x.detach().sum()))

    monkeypatch.setattr(RowParallelLinear, "forward", asking)
    words = "--cuda-graph-impl local --cuda-graph-warmup-steps 1"
    with built(flags(words, size="tiny", length=128)) as step:
        first, second = step.take(), step.take()
    assert first.forbidden == []
    found = Counter(wait.partition(" at ")[0] for wait in second.forbidden)
    captured = 2 * LAYERS  # such linear layers
    once = {"_to_copy": 2, "pin_memory": 1, "_local_scalar_dense": 1}
    assert found == {name: captured * count for name, count in once.items()}


@ON_H200
def test_a_pass_over_the_vocabulary_and_its_bytes_are_reported() -> None:
    """The logits in float32, as an eager cross-entropy has them, are beyond the budget."""
    with built(flags("--cross-entropy-impl eager")) as step:
        trace = step.take()
        rows = budget.rows_of(trace.totals(), step.num_weights, step.num_tokens)
    assert any(
        kind.startswith("logits") for kind in budget.exceeded(rows, budget.read("steps", "bf16"))
    )
    known = budget.read("operations over the vocabulary", "bf16")
    assert any(
        "_to_copy" in name for name in trace.over(trace.vocabulary * 1024) if name not in known
    )


def test_a_function_that_is_compiled_for_every_length_is_counted() -> None:
    @functools.partial(Compiled, by_shape=True)
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    with compiled_graphs() as graphs:
        for length in (8, 16, 32):
            doubled(torch.empty(length, 1, 64, device="cuda"))
    assert [graph.name for graph in graphs] == ["doubled"] * 3
