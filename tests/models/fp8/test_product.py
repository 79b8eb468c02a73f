"""The product of two 8-bit matrices: exact arithmetic, and torch's own."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.models.fp8.formats import E4M3, E5M2, Quantized, cast, largest, scale_for
from megatron_ext.models.fp8.product import _filled_up, product
from tests.models.fp8.bounds import error_of_product


def quantized(x: torch.Tensor, dtype: torch.dtype, *, by_rows: bool) -> Quantized:
    scale = scale_for(largest(x, of_rows=by_rows), torch.finfo(dtype).max)
    return Quantized(cast(x, scale, dtype), scale)


def matrices(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(32, 64, generator=generator) * torch.logspace(-6, 2, 32)[:, None]
    return a, torch.randn(48, 64, generator=generator) * 0.02


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_within_the_error_of_the_formats(dtype: torch.dtype, by_rows: bool) -> None:
    a, b = matrices(2)
    qa, qb = quantized(a, dtype, by_rows=by_rows), quantized(b, E4M3, by_rows=by_rows)
    got = product(qa, qb, torch.float32)
    want = a.double() @ b.double().t()
    bound = error_of_product(a, b, qa, qb)
    assert ((got.double() - want).abs() <= bound).all()
    # The bound is no blank cheque: the error reaches a hundredth of it.
    assert ((got.double() - want).abs() > bound / 100).any()


@pytest.mark.parametrize("by_rows", [False, True])
def test_is_the_product_of_the_quantized_matrices(by_rows: bool) -> None:
    a, b = matrices(3)
    qa, qb = quantized(a, E5M2, by_rows=by_rows), quantized(b, E4M3, by_rows=by_rows)
    want = (qa.values.double() / qa.scale.double()) @ (qb.values.double() / qb.scale.double()).t()
    got = product(qa, qb, torch.float32).double()
    size = qa.dequantized().double().abs() @ qb.dequantized().double().abs().t()
    assert ((got - want).abs() <= 2.0**-20 * size).all()


def test_rows_of_their_own_scale_keep_small_rows() -> None:
    """With one scale the smallest rows are lost, as the format says."""
    a, b = matrices(4)
    want = a.double() @ b.double().t()

    def error(by_rows: bool) -> float:
        qa, qb = quantized(a, E4M3, by_rows=by_rows), quantized(b, E4M3, by_rows=by_rows)
        got = product(qa, qb, torch.float32).double()
        return float((got - want)[0].norm() / want[0].norm())

    assert error(by_rows=False) == 1.0
    assert error(by_rows=True) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_what_torch_multiplies(dtype: torch.dtype) -> None:
    """``torch._scaled_mm``, which GPUs run, on the CPU of versions that have it there."""
    a, b = matrices(5)
    qa, qb = quantized(a, E4M3, by_rows=False), quantized(b, E4M3, by_rows=False)
    want = torch._scaled_mm(
        qa.values,
        qb.values.t(),
        scale_a=qa.scale.reciprocal(),
        scale_b=qb.scale.reciprocal(),
        out_dtype=dtype,
    )
    size = qa.dequantized().abs() @ qb.dequantized().abs().t()
    tolerance = 2.0**-19 if dtype == torch.float32 else 2.0**-8
    assert ((product(qa, qb, dtype) - want).float().abs() <= tolerance * size).all()


def test_nan_and_infinity_reach_everything() -> None:
    a, b = matrices(6)
    for bad in (torch.nan, torch.inf):
        spoiled = a.clone()
        spoiled[3, 4] = bad
        qa, qb = quantized(spoiled, E4M3, by_rows=False), quantized(b, E4M3, by_rows=False)
        assert product(qa, qb, torch.float32).isnan().all()


def test_zeros_give_zeros() -> None:
    a, b = matrices(7)
    qa, qb = quantized(a * 0, E4M3, by_rows=False), quantized(b, E4M3, by_rows=False)
    assert not product(qa, qb, torch.float32).any()


def test_filled_up_for_the_hardware() -> None:
    values = torch.ones(4, 24).to(E4M3)
    filled = _filled_up(values)
    assert filled.shape == (4, 32) and filled.dtype == E4M3
    assert torch.equal(filled[:, :24].float(), values.float())
    assert not filled[:, 24:].float().any()
    assert _filled_up(torch.ones(4, 32).to(E4M3)).shape == (4, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("fast", [False, True])
def test_a_gpu_gives_the_numbers_of_a_cpu(dtype: torch.dtype, by_rows: bool, fast: bool) -> None:
    a, b = matrices(8)
    qa, qb = quantized(a, dtype, by_rows=by_rows), quantized(b, E4M3, by_rows=by_rows)
    there = [Quantized(q.values.cuda(), q.scale.cuda()) for q in (qa, qb)]
    got = product(there[0], there[1], torch.bfloat16, fast=fast).cpu().float()
    size = qa.dequantized().abs() @ qb.dequantized().abs().t()
    tolerance = 2.0**-8 + (2.0**-11 if fast else 0)
    assert ((got - product(qa, qb, torch.float32)).abs() <= tolerance * size).all()
    on_gpu = quantized(a.cuda(), dtype, by_rows=by_rows)
    assert torch.equal(on_gpu.values.cpu().float(), qa.values.float())
