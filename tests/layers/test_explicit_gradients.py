"""Functions with explicit gradients against autograd's of the same formulas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.layers.explicit_gradients import rotated_heads, swiglu
from megatron_ext.layers.pointwise import queries_keys_values

S, B, D = 5, 2, 8


def plain_swiglu(wide: Tensor, scale: Tensor | None = None) -> Tensor:
    gate, linear = wide.chunk(2, dim=-1)
    narrow = F.silu(gate) * linear
    return narrow if scale is None else narrow * scale


def angles() -> tuple[Tensor, Tensor]:
    turns = torch.randn(S, 1, 1, D // 2, generator=torch.Generator().manual_seed(3))
    return turns.cos(), turns.sin()


def heads(groups: int) -> Callable[[Tensor], Any]:
    return lambda projected: rotated_heads(projected, groups, D, *angles())


def plain_heads(groups: int) -> Callable[[Tensor], Any]:
    rest: Any = (False, None, None, None, None, None)
    return lambda x: queries_keys_values.eager(x, None, groups, D, *angles(), *rest)


@pytest.mark.parametrize(
    ("explicit", "plain", "shapes"),
    [
        (swiglu, plain_swiglu, [(S, B, 12)]),
        (swiglu, plain_swiglu, [(S, 12), (S, 1)]),
        (heads(2), plain_heads(2), [(S, B, 2 * 3 * D)]),
        (heads(2), plain_heads(2), [(S, B, 2 * 5 * D)]),
    ],
    ids=["swiglu", "swiglu of experts", "heads", "heads of grouped queries"],
)
def test_outputs_and_gradients_equal_autograds(
    explicit: Callable[..., Any], plain: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    def results(function: Callable[..., Any]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(x, generator=generator).requires_grad_() for x in shapes]
        made = function(*inputs)
        outputs = made if isinstance(made, tuple) else (made,)
        incoming = [torch.randn(x.shape, generator=generator) for x in outputs]
        # As attention gives them: not contiguous.
        incoming = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in incoming]
        return [*outputs, *torch.autograd.grad(outputs, inputs, incoming)]

    for got, want in zip(results(explicit), results(plain), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
