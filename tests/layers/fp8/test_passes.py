"""Quantization in one pass: both layouts, and compiled as it is step by step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.layers.fp8.matrices import (
    E4M3,
    E5M2,
    Function,
    Pass,
    cast,
    largest,
    quantize,
    quantize_with,
    scale_for,
)

FUNCTIONS = {
    "tensor": (quantize, (None, E4M3, None, "both")),
    "rows": (quantize, (None, E5M2, 1, "rows")),
    "columns": (quantize, (None, E5M2, 0, "columns")),
    "across": (quantize, (None, E4M3, 0, "rows")),
    "known magnitude": (quantize, (torch.tensor(3.0), E4M3, None, "both")),
    "known scale": (quantize_with, (torch.tensor(1.7), E5M2, "both")),
}


def matrix(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(m)
    return (torch.randn(m, k, generator=generator) * torch.logspace(-3, 2, m)[:, None]).to(dtype)


def same(got: Pass, want: Pass) -> None:
    """Check that two passes agree to the bit."""
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
            assert torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize("along", [None, 0])
@pytest.mark.parametrize("m", [32, 21])
def test_both_layouts_hold_the_same_numbers(m: int, along: int | None) -> None:
    x = matrix(m, 48)
    size = x.float().abs()
    amax = size.amax() if along is None else size.amax(along, keepdim=True)
    scale = scale_for(amax, 448.0)
    want = (x.float() * scale).clamp(-448, 448).to(E4M3).float()
    found = quantize(x, None, E4M3, along, "both")
    assert found.rows is not None and found.columns is not None
    assert torch.equal(found.number, scale)
    assert torch.equal(found.rows.float(), want)
    assert found.columns.shape == (48, math.ceil(m / 16) * 16) and found.columns.is_contiguous()
    assert torch.equal(found.columns.float()[:, :m], want.t())
    assert not found.columns.float()[:, m:].any()


def test_the_largest_magnitude_is_a_by_product() -> None:
    x, scale = matrix(32, 48), torch.tensor(0.5)
    found = quantize_with(x, scale, E5M2, "columns")
    assert found.number == x.abs().max() and found.rows is None and found.columns is not None
    assert torch.equal(found.columns.float(), cast(x, scale, E5M2).float().t())


def test_nothing_has_no_magnitude() -> None:
    x = torch.ones(0, 32)
    assert largest(x) == 0.0
    assert largest(x, 1).shape == (0, 1) and largest(x, 0).tolist() == [[0.0] * 32]
    found = quantize(x, None, E4M3, 0, "columns")
    assert found.columns is not None and found.columns.shape == (32, 0)
    assert found.number.tolist() == [[1.0] * 32]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_numbers_are_those_step_by_step(name: str) -> None:
    function, more = FUNCTIONS[name]
    faster = Function(function)
    with compiled_on_cpu("aot_eager"):
        for x in (matrix(32, 48), matrix(21, 32)):
            same(faster(x, *more), function(x, *more))
        spoiled = matrix(32, 48)
        spoiled[3, 4] = torch.nan
        got = faster(spoiled, *more)
    assert torch.equal(got.number.isnan(), function(spoiled, *more).number.isnan())


def test_numbers_of_rows_that_vary_compile_twice_at_most() -> None:
    """One compilation serves the first number, another all others."""
    counter = CompileCounterWithBackend("eager")
    faster = Function(quantize)
    with compiled_on_cpu(counter):
        for m in (18, 37, 50, 67):
            x = matrix(m, 32)
            got = faster(x, None, E4M3, None, "both", varies=True)
            same(got, quantize(x, None, E4M3, None, "both"))
    assert 1 <= counter.frame_count <= 2


def test_every_shape_that_does_not_vary_is_compiled() -> None:
    """Each shape compiles once, and more shapes than torch allows one function by default."""
    counter = CompileCounterWithBackend("eager")
    faster = Function(largest)
    with compiled_on_cpu(counter):
        for k in range(1, 7):
            assert faster(torch.full((2, 16 * k), float(k))) == k
            assert faster(torch.full((2, 16 * k), 1.0)) == 1.0
            assert faster(torch.full((3, 16 * k), 2.0)) == 2.0
    assert counter.frame_count == 12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "columns", "known scale"])
def test_generated_code_gives_the_same_numbers(name: str) -> None:
    """Inductor, the compiler that runs on a GPU, here writes C++."""
    function, more = FUNCTIONS[name]
    with compiled_on_cpu("inductor"):
        for x in (matrix(64, 48), matrix(21, 32)):
            same(Function(function)(x, *more), function(x, *more))
