"""An MLP in 8 bits with given scales: which kernels it launches, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.fp8 import kernels
from megatron_ext.layers.fp8.activation import joined
from megatron_ext.layers.fp8.linear import KeptWeights, fp8_linear
from megatron_ext.layers.fp8.matrices import Layouts
from megatron_ext.layers.weight_gradients import LinearCall
from tests.gpu_proof.cases import FFN, H, S, half, single
from tests.gpu_proof.compiler import compiled_graphs
from tests.gpu_proof.fake_cuda import DEVICE
from tests.layers.fp8.test_linear import scaling_of


def layer(n: int, k: int) -> Any:
    """Return what `joined` and `fp8_linear` read of a layer whose scales are known."""
    weight: Any = torch.nn.Parameter(half(n, k, grad=False))
    weight.main_grad, weight.overwrite_main_grad = single(n, k), True
    scaling = scaling_of("delayed").to(DEVICE)
    scaling.has_history = True
    return SimpleNamespace(weight=weight, fp8=scaling, lora=None, bias=None)


def call(linear: Any, x: Tensor) -> Tensor:
    settings = LinearCall(linear.weight, None, True, scaling=linear.fp8)
    return fp8_linear(x, linear.weight, None, settings)


@pytest.mark.usefixtures("fake_tensors")
def test_an_mlp_casts_each_tensor_once_and_sums_in_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    casts: list[str] = []
    outputs: list[Tensor | None] = []
    run, multiply = kernels._run, torch._scaled_mm

    def cast(name: str, *args: Any, **more: Any) -> Layouts:
        casts.append(name)
        return run(name, *args, **more)

    def product(*args: Any, out: Tensor | None = None, **more: Any) -> Tensor:
        outputs.append(out)
        result = multiply(*args, **more)
        if out is None:
            return result
        # Torch has the form with `out` for tensors with memory only.
        assert (out.shape, out.dtype) == (result.shape, result.dtype)
        return out

    monkeypatch.setattr(kernels, "_run", cast)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    first, second = layer(2 * FFN, H), layer(H, FFN)
    with compiled_graphs() as graphs, KeptWeights([first.fp8, second.fp8]).kept():
        wide = call(first, half(S, 1, H))
        with joined(first, second, wide, "silu", True) as joins:
            assert joins
            output = call(second, wide)
        assert casts == ["cast", "cast", "activated", "cast"]  # input, weight, activation, weight
        output.backward(half(S, 1, H, grad=False))
    assert casts[4:] == ["cast", "gradient_before"]
    sums = [first.weight.main_grad, second.weight.main_grad]
    assert len(outputs) == 6 and all(any(x is y for x in outputs) for y in sums)
    assert graphs == []
