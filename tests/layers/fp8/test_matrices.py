"""Casting to 8 bits, against an enumeration of all their numbers."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.layers.fp8.casting import KNOWN_SCALE, Function
from megatron_ext.layers.fp8.matrices import (
    E4M3,
    E5M2,
    Pass,
    Quantized,
    cast,
    largest,
    quantize,
    quantize_with,
    scale_for,
)

FORMATS = [E4M3, E5M2]
ONE = torch.ones(())


def numbers_of(dtype: torch.dtype) -> Tensor:
    """Return all finite numbers of a format, by its definition: sign, exponent, mantissa."""
    exponent_bits, mantissa_bits = (4, 3) if dtype is E4M3 else (5, 2)
    bias = 2 ** (exponent_bits - 1) - 1
    found = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            last = exponent == 2**exponent_bits - 1
            if last and (dtype is E5M2 or mantissa == 2**mantissa_bits - 1):
                continue
            fraction = mantissa / 2**mantissa_bits
            value = math.ldexp((exponent > 0) + fraction, max(exponent, 1) - bias)
            found += [value, -value]
    return torch.tensor(sorted(set(found)), dtype=torch.float64)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
def test_cast_gives_the_nearest_number(dtype: torch.dtype, of: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 64, generator=generator) * 10).to(of)
    scale = torch.tensor(1.7)
    given = cast(x, scale, dtype)
    assert given.dtype == dtype and given.is_contiguous()
    scaled = (x.float() * scale).double()
    distance = (scaled[..., None] - numbers_of(dtype)).abs().amin(dim=-1)
    assert torch.equal((given.double() - scaled).abs(), distance)


@pytest.mark.parametrize(("dtype", "limit"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_the_formats_numbers_and_nan_stay_the_rest_is_cut(dtype: torch.dtype, limit: float) -> None:
    numbers = numbers_of(dtype)[None]
    assert torch.equal(cast(numbers.float(), ONE, dtype).double(), numbers)
    x = torch.tensor([[limit, limit * 1.1, -limit * 100, torch.inf, -torch.inf]])
    want = torch.tensor([[limit, limit, -limit, limit, -limit]])
    assert torch.equal(cast(x, ONE, dtype).float(), want)
    x = torch.tensor([[1.0, torch.nan]])
    assert cast(x, ONE, dtype).float().isnan().tolist() == [[False, True]]
    assert cast(x, torch.tensor(torch.nan), dtype).float().isnan().all()


def test_scales_follow_the_formula() -> None:
    amax = torch.tensor([2.0, 448.0, 0.0, torch.inf, torch.nan, 1e-40])
    scale = scale_for(amax, 448.0)
    assert scale[:3].tolist() == [224.0, 1.0, 1.0]
    assert scale[3:5].isnan().all()
    assert scale[5] == torch.finfo(torch.float32).max
    assert scale_for(amax[:1], 448.0, margin=2).tolist() == [56.0]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_history_decides_between_the_given_scale_and_that_of_the_tensor(
    backend: str | None,
) -> None:
    amax, given = torch.tensor(2.0), torch.tensor(7.0)
    none, some = torch.zeros(3), torch.tensor([0.0, 0.0, 4.0])
    with nullcontext() if backend is None else compiled_on_cpu(backend):
        assert [float(x) for x in KNOWN_SCALE(amax, some, given, 448.0)] == [7.0, float(1 / given)]
        assert [float(x) for x in KNOWN_SCALE(amax, none, given, 448.0)] == [
            224.0,
            float(1 / torch.tensor(224.0)),
        ]
        for bad in (torch.nan, torch.inf):
            found = KNOWN_SCALE(torch.tensor(bad), some, given, 448.0)
            assert all(x.isnan() for x in found)


def test_largest_magnitudes() -> None:
    x = torch.tensor([[1.0, -3.0], [2.0, 0.5]])
    assert largest(x) == 3.0
    assert largest(x, along=1).tolist() == [[3.0], [2.0]]
    assert largest(torch.tensor([[1.0, torch.nan]])).isnan()
    assert largest(x.bfloat16()).dtype == torch.float32


def test_transposed_and_dequantized() -> None:
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
    quantized = Quantized(cast(x, torch.tensor(4.0), E4M3), torch.tensor(4.0))
    turned = quantized.transposed()
    assert turned.values.is_contiguous()
    assert torch.equal(turned.dequantized(), quantized.dequantized().t())
    few = Quantized(quantized.values[:3], quantized.scale).transposed().values
    assert torch.equal(few[:, :3].float(), quantized.values[:3].t().float())
    assert few.shape == (5, 16) and not few[:, 3:].float().any()
    assert torch.allclose(quantized.dequantized(), x, rtol=2.0**-4, atol=2.0**-12)


FUNCTIONS = {
    "tensor": (quantize, (None, E4M3, None, "both")),
    "rows": (quantize, (None, E5M2, 1, "rows")),
    "columns": (quantize, (None, E5M2, 0, "columns")),
    "across": (quantize, (None, E4M3, 0, "rows")),
    "known magnitude": (quantize, (torch.tensor(3.0), E4M3, None, "both")),
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
    assert torch.equal(found.scale, scale) and torch.equal(found.inverse, 1 / scale)
    assert torch.equal(found.rows.float(), want)
    assert found.columns.shape == (48, math.ceil(m / 16) * 16) and found.columns.is_contiguous()
    assert torch.equal(found.columns.float()[:, :m], want.t())
    assert not found.columns.float()[:, m:].any()


def test_the_largest_magnitude_is_a_by_product() -> None:
    x, scale, noted = matrix(32, 48), torch.tensor(0.5), torch.tensor(1e-3)
    rows, columns = quantize_with(x, scale, E5M2, "columns", noted)
    assert noted == x.abs().max() and rows is None and columns is not None
    assert torch.equal(columns.float(), cast(x, scale, E5M2).float().t())
    quantize_with(x / 2, scale, E5M2, "rows", noted)
    assert noted == x.abs().max()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_with_a_given_scale_what_is_not_finite_becomes_nan(bad: float) -> None:
    """Cut to the largest number of the format, an infinite value would not be seen again."""
    x, noted = matrix(16, 32), torch.tensor(0.0)
    x[3, 4] = bad
    rows, columns = quantize_with(x, ONE, E4M3, "both", noted)
    for layout in (rows, columns.t()):
        assert layout.float().isnan().nonzero().tolist() == [[3, 4]]
    assert not noted.isfinite()


def test_nothing_has_no_magnitude() -> None:
    x = torch.ones(0, 32)
    assert largest(x) == 0.0
    assert largest(x, 1).shape == (0, 1) and largest(x, 0).tolist() == [[0.0] * 32]
    found = quantize(x, None, E4M3, 0, "columns")
    assert found.columns is not None and found.columns.shape == (32, 0)
    assert found.scale.tolist() == [[1.0] * 32]


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
    assert torch.equal(got.scale.isnan(), function(spoiled, *more).scale.isnan())


def test_numbers_of_rows_that_vary_compile_twice_at_most() -> None:
    counter = CompileCounterWithBackend("eager")
    faster = Function(quantize)
    with compiled_on_cpu(counter):
        for m in (18, 37, 50, 67):
            x = matrix(m, 32)
            got = faster(x, None, E4M3, None, "both", varies=True)
            same(got, quantize(x, None, E4M3, None, "both"))
    assert 1 <= counter.frame_count <= 2


def test_every_shape_that_does_not_vary_is_compiled() -> None:
    counter = CompileCounterWithBackend("eager")
    faster = Function(largest)
    with compiled_on_cpu(counter):
        for k in range(1, 7):
            assert faster(torch.full((2, 16 * k), float(k))) == k
            assert faster(torch.full((2, 16 * k), 1.0)) == 1.0
            assert faster(torch.full((3, 16 * k), 2.0)) == 2.0
    assert counter.frame_count == 12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "columns"])
def test_generated_code_gives_the_same_numbers(name: str) -> None:
    """Inductor, the compiler that runs on a GPU, here writes C++."""
    function, more = FUNCTIONS[name]
    with compiled_on_cpu("inductor"):
        for x in (matrix(64, 48), matrix(21, 32)):
            same(Function(function)(x, *more), function(x, *more))
