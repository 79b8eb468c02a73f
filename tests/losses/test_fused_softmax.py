"""The fused blocks of a GPU, computed on a CPU, against whole logits in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.losses import logit_blocks
from megatron_ext.losses.logit_blocks import Head
from megatron_ext.losses.softmax_kernels import statistics, to_gradient_
from tests.losses.dense_cross_entropy import (
    ALONE,
    BLOCK_SIZES,
    Inputs,
    Result,
    assert_close,
    dense,
    error,
    inputs,
    leaves,
    weighted,
)
from tests.losses.test_linear_cross_entropy import counted, rank_inputs
from tests.ranks import ParallelContext, ranks

C, V = 6, 33


def on_a_gpu(compiler: str, *args: Any, **kwargs: Any) -> Result:
    """Put the loss on its fused path, through a backend of `torch.compile`."""
    with compiled_on_cpu(compiler):
        return weighted(*args, **kwargs)


def block(kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits far from 0, and columns that reach both ends."""
    generator = torch.Generator().manual_seed(0)
    logits = 100 + 5 * torch.randn(C, V, generator=generator)
    return logits.to(kind), torch.tensor([[0], [V - 1], [5], [0], [7], [8]])


@pytest.mark.parametrize(
    ("kind", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)]
)
@pytest.mark.parametrize(
    "compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_both_functions_equal_float64(kind: torch.dtype, tolerance: float, compiler: str) -> None:
    logits, column = block(kind)
    truth = logits.double()
    with compiled_on_cpu(compiler):
        found = statistics(logits, column, True)
    highest, lse = truth.amax(1, keepdim=True), truth.logsumexp(1, keepdim=True)
    expected = (highest, truth.gather(1, column), (lse - highest).exp(), truth.sum(1, keepdim=True))
    for got, true in zip(found, expected, strict=True):
        assert got.dtype == torch.float32 and error(got, true) <= 1e-6
    scale, at_label, everywhere = torch.linspace(-1, 1, 3 * C).view(3, C, 1).unbind()
    gradient = scale.double() * (truth - lse).exp() + everywhere.double()
    gradient.scatter_add_(1, column, at_label.double())
    place = logits.data_ptr()
    with compiled_on_cpu(compiler):
        to_gradient_(logits, column, lse.float(), scale, at_label, everywhere)
    assert logits.data_ptr() == place
    # The rounding of lse near 100 is what float32 loses.
    assert error(logits, gradient) <= max(tolerance, 2e-5)


@pytest.mark.slow
def test_the_compiler_makes_no_tensor_as_large_as_the_logits() -> None:
    logits, column = block(torch.bfloat16)
    rows = [torch.zeros(C, 1) for _ in range(4)]
    for function, arguments in (
        (statistics, (logits, column, True)),
        (to_gradient_, (logits, column, *rows)),
    ):
        torch._dynamo.reset()
        _, (code,) = run_and_get_code(torch.compile(function.eager), *arguments)
        assert f"({C}, {V})" in code
        assert f"empty_strided_cpu(({C}, {V})" not in code


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("given", [{}, {"label_smoothing": 0.3, "z_loss_coefficient": 0.1}])
def test_equals_dense(
    block_size: int, given: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(logit_blocks, "_sums")
    found = on_a_gpu("eager", leaves(inputs()), block_size=block_size, **given, **ALONE)
    assert_close(found, dense(inputs(), **given))


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_equals_dense_when_compiled(compiler: str) -> None:
    assert_close(on_a_gpu(compiler, leaves(inputs()), block_size=7, **ALONE), dense(inputs()))


@ranks(tp=2)
def test_equals_dense_on_two_ranks(
    context: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"label_smoothing": 0.1, "z_loss_coefficient": 1e-2}
    given = {"tp_group": context.pgs.tp, "sequence_parallel": False, "block_size": 20, **how}
    with counted(monkeypatch) as sizes:
        found = on_a_gpu("eager", rank_inputs(context, False), **given)
    losses, of_hidden, of_weight = dense(inputs(), **how)
    assert_close(found, (losses, of_hidden, of_weight.chunk(2)[context.tp_rank]))
    assert sizes[:6] == [20, 60, 20, 60, 8, 24]


def larger() -> Inputs:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(256, 1, 32, generator=generator),
        torch.randn(96, 32, generator=generator) * 0.1,
        torch.randint(0, 96, (1, 256), generator=generator),
        torch.rand(1, 256, generator=generator) + 0.5,
    )


def distance(found: Tensor | None, truth: Tensor | None) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def eager(values: Inputs) -> Result:
    """Compute whole logits in the type of the head, as torch's users write it."""
    hidden, weight, labels, weights = values
    logits = (hidden[:, 0] @ weight.t()).float()
    losses = torch.nn.functional.cross_entropy(logits, labels[0], reduction="none")
    torch.dot(losses, weights[0]).backward()
    return losses.detach()[None], hidden.grad, weight.grad


def test_bfloat16_is_as_exact_as_whole_logits() -> None:
    found = on_a_gpu("eager", leaves(larger(), torch.bfloat16), block_size=64, **ALONE)
    whole = eager(leaves(larger(), torch.bfloat16))
    truth = dense(leaves(larger(), torch.bfloat16))
    for one, other, true in zip(found, whole, truth, strict=True):
        # The loss rounds a gradient once more when it scales it.
        assert distance(one, true) <= 1.5 * distance(other, true) < 6e-3


def adding(total: Tensor, one: Tensor, other: Tensor, **given: Any) -> Tensor:
    """Stand in for a GPU's product of 16-bit matrices that is added to a float32 one."""
    assert given["out"] is total and given["out_dtype"] == total.dtype == torch.float32
    assert one.dtype == other.dtype == torch.bfloat16
    product = one.float() @ other.float()
    return total.copy_(product if given["beta"] == 0 else given["beta"] * total + product)


@pytest.mark.parametrize("into_main", [False, True])
def test_products_are_added_up_in_float32(into_main: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_blocks, "adds_in_float32", lambda device, kind: True)
    monkeypatch.setattr(torch, "addmm", adding)
    values = leaves(larger(), torch.bfloat16)
    weight = values[1]
    main = torch.ones_like(weight, dtype=torch.float32)
    weight.main_grad = main  # type: ignore[attr-defined]
    options = {"block_size": 64, "gradient_accumulation_fusion": into_main, **ALONE}
    _, _, found = on_a_gpu("eager", values, **options)
    truth = dense(leaves(larger(), torch.bfloat16))[2]
    assert distance(main - 1 if into_main else found, truth) < 6e-3
    assert into_main or bool((main == 1).all())


@pytest.mark.parametrize(
    ("tokens", "hidden", "rows"),
    [(1, 4096, 1), (8192, 4096, 4096), (32768, 4096, 8192), (131072, 2048, 4096)],
)
def test_a_fused_block_is_no_larger_than_a_gradient(tokens: int, hidden: int, rows: int) -> None:
    assert Head(None, None, False).rows(tokens, hidden) == rows
    assert Head(7, None, False).rows(tokens, hidden) == min(7, tokens)
