"""8-bit products and the passes before them on a GPU: the numbers of a CPU, in few kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import metrics

from megatron_ext.device.rates import has_fp8
from megatron_ext.layers.fp8.matrices import (
    E4M3,
    E5M2,
    Function,
    Quantized,
    arguments,
    product,
    quantize_with,
)
from tests.layers.fp8.test_passes import FUNCTIONS, matrix
from tests.layers.fp8.test_product import VIOLATIONS, matrices, operands, quantized

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if not has_fp8(torch.device("cuda", 0)):
        pytest.skip("this GPU has no 8-bit products")


def there(q: Quantized) -> Quantized:
    return Quantized(q.values.cuda(), q.scale.cuda())


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("fast", [False, True])
def test_a_product_gives_the_numbers_of_a_cpu(
    dtype: torch.dtype, by_rows: bool, fast: bool
) -> None:
    a, b = matrices(8)
    qa, qb = quantized(a, dtype, by_rows=by_rows), quantized(b, E4M3, by_rows=by_rows)
    got = product(there(qa), there(qb), torch.bfloat16, fast=fast).cpu().float()
    size = qa.dequantized().abs() @ qb.dequantized().abs().t()
    tolerance = 2.0**-8 + (2.0**-11 if fast else 0)
    assert ((got - product(qa, qb, torch.float32)).abs() <= tolerance * size).all()


def test_one_scale_may_give_float32() -> None:
    a, b = matrices(9)
    qa, qb = quantized(a, E5M2, by_rows=False), quantized(b, E4M3, by_rows=False)
    got = product(there(qa), there(qb), torch.float32).cpu()
    size = qa.dequantized().abs() @ qb.dequantized().abs().t()
    # Tensor cores keep fewer bits of a sum than float32 has.
    assert ((got - product(qa, qb, torch.float32)).abs() <= 2.0**-11 * size).all()
    assert not torch.equal(got, got.bfloat16().float())


@pytest.mark.parametrize("rule", VIOLATIONS)
def test_the_gpu_refuses_what_we_refuse(rule: str) -> None:
    """So that no rule of `check_layout` is idle on the GPUs of today, but for newer layouts."""
    if torch.cuda.get_device_capability() >= (10, 0) and "lies" in rule:
        pytest.skip("newer GPUs multiply matrices in any layout")
    given: dict[str, Any] = operands()
    for name, change in VIOLATIONS[rule].items():
        given[name] = change(given[name])
    if rule == "the second is in e4m3":
        given["a"] = given["a"].float().to(E5M2)  # Of two in e5m2 it is the GPU that says no.
    moved = {name: x.cuda() if torch.is_tensor(x) else x for name, x in given.items()}
    with pytest.raises((RuntimeError, ValueError)):
        torch._scaled_mm(moved.pop("a"), moved.pop("b"), **moved)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_pass_gives_the_numbers_of_a_cpu(name: str) -> None:
    function, more = FUNCTIONS[name]
    moved = [value.cuda() if torch.is_tensor(value) else value for value in more]
    for x in (matrix(256, 128), matrix(21, 32)):
        got = Function(function)(x.cuda(), *moved)
        want = function(x, *more)
        # A GPU's division may round differently, which moves a number to the next one at most.
        assert torch.allclose(got.number.cpu(), want.number, rtol=1e-6)
        for ours, theirs in zip(got[1:], want[1:], strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                apart = ours.cpu().float() != theirs.float()
                assert apart.float().mean() < 1e-3 and ours.stride() == theirs.stride()


def test_both_layouts_and_the_magnitude_take_one_pass() -> None:
    """One kernel over the matrix, and one that finishes the magnitude."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    metrics.reset()
    Function(quantize_with)(x, torch.ones((), device="cuda"), E4M3, "both")
    assert metrics.generated_kernel_count <= 2


def test_arguments_of_a_product_copy_nothing() -> None:
    a, b = matrices(10)
    qa, qb = there(quantized(a, E4M3, by_rows=True)), there(quantized(b, E4M3, by_rows=True))
    given = arguments(qa, qb, torch.bfloat16)
    assert given["a"].data_ptr() == qa.values.data_ptr()
    assert given["b"].data_ptr() == qb.values.data_ptr()
