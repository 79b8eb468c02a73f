"""The product of two 8-bit matrices: exact arithmetic, and torch's own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ext.layers.fp8.matrices import (
    E4M3,
    E5M2,
    Quantized,
    arguments,
    cast,
    check_layout,
    largest,
    product,
    scale_for,
)

ONE = torch.ones(())


def quantized(x: torch.Tensor, dtype: torch.dtype, *, by_rows: bool) -> Quantized:
    scale = scale_for(largest(x, along=1 if by_rows else None), torch.finfo(dtype).max)
    return Quantized(cast(x, scale, dtype), scale)


def matrices(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
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
    """One scale for the matrix would lose the smallest rows, as the format says."""
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
    scales = {"scale_a": qa.scale.reciprocal(), "scale_b": qb.scale.reciprocal()}
    want = torch._scaled_mm(qa.values, qb.values.t(), **scales, out_dtype=dtype)
    size = qa.dequantized().abs() @ qb.dequantized().abs().t()
    tolerance = 2.0**-19 if dtype == torch.float32 else 2.0**-8
    assert ((product(qa, qb, dtype) - want).float().abs() <= tolerance * size).all()


def test_nan_and_infinity_reach_everything_and_zeros_give_zeros() -> None:
    a, b = (quantized(x, E4M3, by_rows=False) for x in (matrices(7)[0] * 0, matrices(7)[1]))
    assert not product(a, b, torch.float32).any()
    for bad in (torch.nan, torch.inf):
        spoiled = matrices(6)[0]
        spoiled[3, 4] = bad
        assert product(quantized(spoiled, E4M3, by_rows=False), b, torch.float32).isnan().all()


def operands(*, by_rows: bool = False, m: int = 32, k: int = 64, n: int = 48) -> dict[str, Any]:
    """Return the arguments that `product` would give torch."""
    a, b = (torch.ones(sides).to(E4M3) for sides in ((m, k), (n, k)))
    scales = (torch.ones(m, 1), torch.ones(n, 1)) if by_rows else (torch.ones(()), torch.ones(()))
    return arguments(Quantized(a, scales[0]), Quantized(b, scales[1]), torch.bfloat16)


@pytest.mark.parametrize("m", [1, 7, 32])
@pytest.mark.parametrize("by_rows", [False, True])
def test_torch_takes_the_arguments_of_a_product(by_rows: bool, m: int) -> None:
    given = operands(by_rows=by_rows, m=m)
    check_layout(**given)
    assert torch_takes(given)


def torch_takes(given: dict[str, Any]) -> bool:
    with FakeTensorMode():
        a, b, scale_a, scale_b = (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
            for x in (given["a"], given["b"], given["scale_a"], given["scale_b"])
        )
        try:
            torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=given["out_dtype"])
        except RuntimeError:
            return False
    return True


@pytest.mark.parametrize(("offset", "direct"), [(0, True), (64, True), (4, False)])
@pytest.mark.parametrize("by_rows", [False, True])
def test_a_product_of_a_gpu_writes_to_a_matrix_of_its_dtype(
    by_rows: bool, offset: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the matrix is not aligned, or the result has another dtype, it is copied."""
    written: list[Tensor | None] = []

    def multiply(
        a: Tensor,
        b: Tensor,
        *,
        scale_a: Tensor,
        scale_b: Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        written.append(out)
        result = (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)
        return result if out is None else out.copy_(result)

    qa, qb = (quantized(x, E4M3, by_rows=by_rows) for x in matrices(2))
    want = product(qa, qb, torch.bfloat16 if by_rows else torch.float32).float()
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    out = torch.full((2048,), torch.nan)[offset : offset + 32 * 48].view(32, 48)
    assert product(qa, qb, torch.float32, out=out) is out
    assert torch.allclose(out, want, rtol=1e-6, atol=0)
    assert len(written) == 1 and (written[0] is out) == (direct and not by_rows)


@pytest.mark.parametrize("m", [32, 0])
def test_a_product_of_a_cpu_writes_to_a_matrix(m: int) -> None:
    a, b = (
        quantized(matrices(2)[0], E4M3, by_rows=False),
        quantized(matrices(2)[1], E4M3, by_rows=False),
    )
    a = Quantized(a.values[:m], a.scale)
    out = torch.full((m, 48), torch.nan)
    assert product(a, b, torch.float32, out=out) is out
    assert torch.equal(out, product(a, b, torch.float32))


def strided(matrix: Tensor) -> Tensor:
    """Return the same numbers, the other way round in memory."""
    return matrix.t().contiguous().t()


VIOLATIONS = {
    "the second is in e4m3": {"b": lambda x: x.float().to(E5M2)},
    "both in 8 bits": {"a": lambda x: x.float()},
    "both have the side that is summed over": {"a": lambda x: x[:, :16].contiguous()},
    "the first lies row by row": {"a": strided},
    "the second lies column by column": {"b": lambda x: x.contiguous()},
    "the side that is summed over divides by 16": {
        "a": lambda x: x[:, :8].contiguous(),
        "b": lambda x: strided(x[:8]),
    },
    "the last side divides by 16": {"b": lambda x: strided(x[:, :40])},
    "both have one scale, or one for each row": {"scale_a": lambda x: torch.ones(3, 1)},
    "scales are in float32": {"scale_a": lambda x: x.double(), "scale_b": lambda x: x.double()},
}
UNCHECKED = ("the second is in e4m3", "both have the side that is summed over")
"""Rules that the GPU's function knows and the one for tensors without memory does not."""


@pytest.mark.parametrize("rule", VIOLATIONS)
def test_what_a_gpu_could_not_multiply_is_refused(rule: str) -> None:
    given = operands()
    for name, change in VIOLATIONS[rule].items():
        given[name] = change(given[name])
    with pytest.raises(ValueError, match=rule):
        check_layout(**given)
    assert rule in UNCHECKED or not torch_takes(given)


def test_scales_of_rows_give_bfloat16_and_are_contiguous() -> None:
    given = operands(by_rows=True)
    with pytest.raises(ValueError, match="the result is in bfloat16, or in float32"):
        check_layout(**{**given, "out_dtype": torch.float32})
    check_layout(**{**operands(), "out_dtype": torch.float32})
    with pytest.raises(ValueError, match="the result is in bfloat16, or in float32"):
        check_layout(**{**operands(), "out_dtype": torch.float16})
    apart = torch.ones(32, 2)[:, :1]
    with pytest.raises(ValueError, match="scales are contiguous"):
        check_layout(**{**given, "scale_a": apart})
    assert not torch_takes({**given, "scale_a": apart})
    with pytest.raises(ValueError, match="both have one scale, or one for each row"):
        check_layout(**{**given, "scale_a": torch.ones(())})


def test_products_of_a_cpu_obey_the_rules_too() -> None:
    a, b = Quantized(torch.ones(4, 8).to(E4M3), ONE), Quantized(torch.ones(16, 8).to(E4M3), ONE)
    with pytest.raises(ValueError, match=r"\[4, 8\] torch.float8_e4m3fn .* divides by 16"):
        product(a, b, torch.float32)


@pytest.mark.parametrize(("m", "k"), [(0, 32), (4, 0)])
def test_nothing_gives_zeros(m: int, k: int) -> None:
    a = Quantized(torch.ones(m, k).to(E4M3), ONE)
    result = product(a, Quantized(torch.ones(16, k).to(E4M3), ONE), torch.bfloat16)
    assert result.shape == (m, 16) and result.dtype == torch.bfloat16 and not result.any()


ROUNDING = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
"""Half of the distance to the next number, relative."""

SMALLEST = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16}
"""The smallest number above zero."""


def error_of(x: Tensor, quantized: Quantized) -> Tensor:
    """Return the most that rounding can change each number of a matrix that no scale cuts off."""
    dtype = quantized.values.dtype
    return ROUNDING[dtype] * x.double().abs() + SMALLEST[dtype] / 2 / quantized.scale.double()


def error_of_product(a: Tensor, b: Tensor, qa: Quantized, qb: Quantized) -> Tensor:
    """Return the most that rounding can change each number of ``a b^T``.

    ``|a b - qa qb| <= |da| |b| + |a| |db| + |da| |db|``, and the sums in float32 of k numbers.
    """
    a, b = a.double().abs(), b.double().abs()
    da, db = error_of(a, qa), error_of(b, qb)
    sums = a.size(1) * 2.0**-23 * ((a + da) @ (b + db).t())
    return da @ b.t() + a @ db.t() + da @ db.t() + sums
