"""Defects that are planted on purpose are reported, so that the other tests can fail."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.compiled import compiled
from tests.gpu_proof.cases import H, hidden
from tests.gpu_proof.test_kernels import CASES, broken_limits, compiled_functions

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
    for name in ("layers.pointwise.normed", "losses.vocabulary.statistics"):
        assert f"megatron_ext.{name}" in named
    assert len(named) >= len({id(case.function) for case in CASES})


def test_fake_tensors_have_no_values() -> None:
    """A test that read one would not be about a GPU."""
    with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
        hidden()[0, 0, H - 1].item()
