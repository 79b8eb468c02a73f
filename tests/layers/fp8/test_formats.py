"""Casting to 8 bits, against an enumeration of all their numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.fp8.matrices import E4M3, E5M2, Quantized, cast, largest, scale_for

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


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_number_of_the_format_stays(dtype: torch.dtype) -> None:
    numbers = numbers_of(dtype)[None]
    assert torch.equal(cast(numbers.float(), ONE, dtype).double(), numbers)


@pytest.mark.parametrize(("dtype", "limit"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_beyond_the_range_is_cut_off(dtype: torch.dtype, limit: float) -> None:
    x = torch.tensor([[limit, limit * 1.1, -limit * 100, torch.inf, -torch.inf]])
    want = torch.tensor([[limit, limit, -limit, limit, -limit]])
    assert torch.equal(cast(x, ONE, dtype).float(), want)


@pytest.mark.parametrize("dtype", FORMATS)
def test_nan_stays(dtype: torch.dtype) -> None:
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
