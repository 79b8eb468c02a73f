"""When the two layers of an MLP join; `interpreted` checks what they compute if they do."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.layers.fp8 import activation
from megatron_ext.layers.fp8.activation import Activation, joined
from tests.layers.fp8.test_linear import scaling_of

WIDE = torch.ones(4, 96)


def layer() -> Any:
    """Return what `joined` reads of a layer that knows its scales."""
    scaling: Any = scaling_of("delayed")
    scaling.has_history = True
    weight = torch.nn.Parameter(torch.ones(4, 4))
    return SimpleNamespace(lora=None, bias=None, weight=weight, fp8=scaling)


@pytest.fixture
def mlp(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the two layers, on a machine that seems to have the kernels."""
    monkeypatch.setattr(activation, "kernels_for", lambda x: object() if x.numel() else None)
    return SimpleNamespace(first=layer(), second=layer())


@pytest.mark.parametrize("trains", [True, False])
def test_only_inside_the_block_the_second_layer_has_the_activation(mlp: Any, trains: bool) -> None:
    mlp.first.weight.requires_grad_(trains)
    with joined(mlp.first, mlp.second, WIDE, "silu", True) as joins:
        assert joins
        assert mlp.second.fp8.activation == Activation("silu", True, mlp.first.fp8, trains)
        assert mlp.first.fp8.activation is None
    assert mlp.second.fp8.activation is None
    with pytest.raises(ArithmeticError), joined(mlp.first, mlp.second, WIDE, "silu", True):
        raise ArithmeticError
    assert mlp.second.fp8.activation is None


@pytest.mark.parametrize(
    "change",
    [
        lambda mlp: setattr(mlp.first, "lora", torch.nn.Identity()),
        lambda mlp: setattr(mlp.second, "lora", torch.nn.Identity()),
        lambda mlp: setattr(mlp.first, "bias", torch.zeros(96)),
        lambda mlp: setattr(mlp.first, "fp8", scaling_of("tensorwise")),
        lambda mlp: setattr(mlp.second, "fp8", None),
        lambda mlp: setattr(mlp.first.fp8, "has_history", False),
        lambda mlp: setattr(mlp.second.fp8, "has_history", False),
        lambda mlp: setattr(mlp.first.fp8.parts, "may_idle", True),
        lambda mlp: setattr(mlp.first.fp8, "config", scaling_of("delayed", fp8_wgrad=False).config),
    ],
)
def test_what_joins_nothing(change: Callable[[Any], None], mlp: Any) -> None:
    change(mlp)
    with joined(mlp.first, mlp.second, WIDE, "silu", True) as joins:
        assert not joins
        assert getattr(mlp.second.fp8, "activation", None) is None


def test_an_mlp_without_tokens_joins_nothing(mlp: Any) -> None:
    with joined(mlp.first, mlp.second, WIDE[:0], "silu", True) as joins:
        assert not joins
