"""Weights are cast to 8 bits once a step, and let go after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.fp8.linear import KeptWeights, fp8_linear
from megatron_ext.layers.fp8.scaling import RECIPES, Role
from megatron_ext.layers.weight_gradients import LinearCall
from tests.layers.fp8.test_linear import scaling_of, tensors, whole_layer


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_casts_a_weight_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three micro-batches share one cast, and what it gives is the same."""
    want = whole_layer(scaling_of(recipe))
    x, weight, gradient = tensors()
    parameter = torch.nn.Parameter(weight)
    scaling = scaling_of(recipe)
    call = LinearCall(parameter, scaling=scaling)
    casts: list[Role] = []
    pair = scaling.pair

    def counted(x: Tensor, role: Role, *, columns: bool) -> Any:
        casts.append(role)
        return pair(x, role, columns=columns)

    monkeypatch.setattr(scaling, "pair", counted)
    monkeypatch.setattr(scaling, "columns", None if recipe != "rowwise" else scaling.columns)
    weights = KeptWeights([torch.nn.ModuleDict({"layer": scaling})])
    with weights.kept():
        for _ in range(3):
            entered = x.clone().requires_grad_()
            parameter.grad = None
            output = fp8_linear(entered, parameter, None, call)
            output.backward(gradient)
            assert entered.grad is not None and parameter.grad is not None
            for got, expected in zip([output, entered.grad, parameter.grad], want, strict=True):
                assert torch.equal(got, expected)
    assert casts.count(Role.WEIGHT) == 1 and casts.count(Role.INPUT) == 3
    assert scaling.kept_weight is None
    with torch.no_grad():
        parameter.mul_(2)
        assert torch.equal(fp8_linear(x, parameter, None, call), 2 * want[0])


def test_weights_are_let_go_after_an_error() -> None:
    scaling = scaling_of("tensorwise")
    with pytest.raises(RuntimeError), KeptWeights([scaling]).kept():
        scaling.weight(tensors()[1])
        assert scaling.kept_weight is not None
        raise RuntimeError
    assert scaling.kept_weight is None and not scaling.keeps_weight
