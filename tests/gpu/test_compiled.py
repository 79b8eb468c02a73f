"""On a GPU the pointwise parts compile, agree with their eager selves, and make fewer kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_ext.layers import compiled as module
from megatron_ext.layers.compiled import compiles
from megatron_ext.layers.pointwise import activated, norm_with_residual
from tests.layers.pointwise_cases import CASES, Case, cast, run
from tests.layers.test_pointwise import HALF_FACTOR, error
from tests.video.model.test_pointwise import CASES as VIDEO_CASES

pytestmark = pytest.mark.gpu


def eagerly(case: Case, arguments: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what the functions give without compilation."""
    with monkeypatch.context() as patched:
        patched.setattr(module._compiler, "backend", None)
        return run(case.function, arguments)


@pytest.mark.parametrize("case", [*CASES, *VIDEO_CASES], ids=lambda case: case.name)
def test_kernels_agree_with_eager_code(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._compiler, "strict", True)
    assert compiles(torch.ones(1, device="cuda"))
    arguments = cast(case.drawn("cuda"), torch.float64)
    truth = eagerly(case, arguments, monkeypatch)
    for index, (got, want) in enumerate(zip(run(case.function, arguments), truth, strict=True)):
        assert error(got, want) < 1e-10, index
    half = cast(arguments, torch.bfloat16)
    pairs = zip(run(case.function, half), eagerly(case, half, monkeypatch), truth, strict=True)
    for index, (got, eager, want) in enumerate(pairs):
        assert got.dtype == eager.dtype
        assert error(got, want) <= HALF_FACTOR * error(eager, want) + 1e-3, index


def kernels(step: Any) -> int:
    """Return the CUDA kernels of one call, after one that compiles."""
    step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return sum(
        event.count
        for event in profiled.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.key
    )


def test_a_norm_and_an_activation_are_a_few_kernels() -> None:
    x = torch.randn(512, 2, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gain = torch.ones(1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def normed() -> None:
        same, y = norm_with_residual(x, gain, None, ("RMSNorm", 1e-5, False))
        torch.autograd.grad((same, y), (x, gain), (x.detach(), x.detach()))

    def gated() -> None:
        y = activated(x, None, None, "silu", True)
        torch.autograd.grad(y, x, torch.ones_like(y))

    assert kernels(normed) <= 4  # forward, input gradient, and at most two for the sum over tokens
    assert kernels(gated) <= 3  # forward, backward, and the ones of this test
