"""Every compiled function against itself as written, outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.layers import pointwise
from megatron_ext.layers.compiled import compiled_on_cpu
from tests.layers.pointwise_cases import CASES, Case, cast, run

EXACT = 1e-12
HALF_FACTOR = 1.5
"""The most that half precision may round, as a multiple of the uncompiled function's error."""


QUICK = ("RMSNorm with residual False", "add and norm bias", "heads with RMSNorm")
BY_KERNELS = (*QUICK, "silu gated=True")


def error(got: Tensor, want: Tensor) -> float:
    """Return the relative error in the L2 norm."""
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def check_exact(case: Case, backend: str) -> None:
    arguments = case.drawn()
    want = run(case.function, arguments)
    with compiled_on_cpu(backend):
        got = run(case.function, arguments)
    for index, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.shape == y.shape and error(x, y) < EXACT, index


def check_kernels(case: Case) -> None:
    """Check that kernels are exact, and in half precision no coarser than uncompiled ones."""
    check_exact(case, "inductor")
    arguments = case.drawn()
    truth = run(case.function, arguments)
    half = cast(arguments, torch.bfloat16)
    eager = run(case.function, half)
    with compiled_on_cpu("inductor"):
        compiled = run(case.function, half)
    for index, (x, y, want) in enumerate(zip(compiled, eager, truth, strict=True)):
        assert x.dtype == y.dtype
        assert error(x, want) <= HALF_FACTOR * error(y, want) + 1e-3, index


@pytest.mark.parametrize(
    "case",
    [x if x.name in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES],
    ids=lambda case: case.name,
)
def test_graphs_are_exact(case: Case) -> None:
    check_exact(case, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [x for x in CASES if x.name in BY_KERNELS], ids=lambda case: case.name
)
def test_kernels_are_exact_and_in_half_precision_no_coarser(case: Case) -> None:
    check_kernels(case)


@pytest.mark.parametrize("normed", [False, True])
def test_dropout_drops_its_share_and_gradients_follow_the_mask(normed: bool) -> None:
    x = torch.ones(64, 4, 128, requires_grad=True)
    residual = torch.zeros(64, 4, 128)
    with compiled_on_cpu():
        if normed:
            gain = torch.ones(128)
            spec = ("RMSNorm", 1e-5, False)
            out, _ = pointwise.bias_dropout_add_norm(
                x, None, residual, 0.25, True, gain, None, spec
            )
        else:
            out = pointwise.bias_dropout_add(x, None, residual, 0.25, True)
        (gradient,) = torch.autograd.grad(out.sum(), x)
    kept = out.detach() != 0
    assert abs(float(kept.float().mean()) - 0.75) < 0.01
    torch.testing.assert_close(out.detach(), kept / 0.75)
    torch.testing.assert_close(gradient, kept / 0.75)
