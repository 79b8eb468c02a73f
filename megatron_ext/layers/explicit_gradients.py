"""Functions of a layer with explicit gradients, for CPUs, where nothing is compiled.

Autograd records every operation and runs one or more for it in the backward pass, each over the
whole tensor. Here a backward pass has as few as the formula needs, and writes parts of a gradient
where they belong instead of joining them. The forward passes compute what megatron-core's functions
do, operation by operation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, direction: int) -> None:
    """Write to ``out`` the pairs of features ``[..., d]`` of ``x``, turned by their angles.

    Feature i is paired with feature i + d / 2. ``direction`` is 1, or -1 to turn back.
    """
    first, second = x.chunk(2, dim=-1)
    turned_first, turned_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=turned_first)
    turned_first.addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=turned_second)
    turned_second.addcmul_(first, sin, value=direction)


class _RotatedHeads(torch.autograd.Function):
    """Splits a projection into queries, keys and values, and rotates queries and keys."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, groups: int, head_dim: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        s, b, _ = projected.shape
        heads = projected.view(s, b, groups, -1, head_dim)
        query = torch.empty_like(heads[..., :-2, :], memory_format=torch.contiguous_format)
        key = torch.empty_like(heads[..., -2, :], memory_format=torch.contiguous_format)
        ctx.save_for_backward(cos, sin)
        ctx.shape = heads.shape
        _rotate(heads[..., :-2, :], cos.unsqueeze(2), sin.unsqueeze(2), query, 1)
        _rotate(heads[..., -2, :], cos, sin, key, 1)
        return query.flatten(2, 3), key, heads[..., -1, :].clone()

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        heads = query.new_empty(ctx.shape)
        of_query = heads[..., :-2, :]
        _rotate(query.view(of_query.shape), cos.unsqueeze(2), sin.unsqueeze(2), of_query, -1)
        _rotate(key, cos, sin, heads[..., -2, :], -1)
        heads[..., -1, :].copy_(value)
        return heads.flatten(2), None, None, None, None


def rotated_heads(
    projected: Tensor, groups: int, head_dim: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries ``[s, b, n, d]`` and keys, and values, ``[s, b, g, d]`` each.

    ``projected`` is ``[s, b, g * (n / g + 2) * d]``: each group's queries, its key and its value.
    ``cos`` and ``sin`` are ``[s, 1, 1, d / 2]``; feature i is paired with feature i + d / 2.
    """
    result: tuple[Tensor, Tensor, Tensor] = _RotatedHeads.apply(  # type: ignore[no-untyped-call]
        projected, groups, head_dim, cos, sin
    )
    return result


class _SwiGLU(torch.autograd.Function):
    """SwiGLU of ``[..., 2 f]``, times a factor of each token if there is one."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor, scale: Tensor | None) -> Tensor:
        gate, linear = wide.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(wide, activated, scale)
        narrow = activated * linear
        return narrow if scale is None else narrow.mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        wide, activated, scale = ctx.saved_tensors
        gate, linear = wide.chunk(2, dim=-1)
        of_activated = gradient * linear
        of_scale = None
        if scale is not None:
            if ctx.needs_input_grad[1]:
                of_scale = (of_activated * activated).sum(dim=-1, keepdim=True)
            of_activated.mul_(scale)
            gradient = gradient * scale
        of_wide = torch.empty_like(wide)
        of_gate, of_linear = of_wide.chunk(2, dim=-1)
        torch.mul(gradient, activated, out=of_linear)
        torch.ops.aten.silu_backward.grad_input(of_activated, gate, grad_input=of_gate)
        return of_wide, of_scale


def swiglu(wide: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return ``silu(gate) * linear * scale``, where the halves of ``wide`` are gate and linear.

    ``wide`` is ``[..., 2 f]``; ``scale`` is ``[..., 1]``, None for 1 (arXiv:2002.05202).
    """
    result: Tensor = _SwiGLU.apply(wide, scale)  # type: ignore[no-untyped-call]
    return result


def gated_mlp(
    mlp: Any, hidden: Tensor, per_token_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the output of an MLP with SwiGLU, and None or a bias that is yet to be added.

    ``mlp`` is a `transformer_layer.MLP`, whose ``forward`` describes the other arguments.
    """
    wide, bias = mlp.linear_fc1(hidden)
    scale = None if per_token_scale is None else per_token_scale.unsqueeze(-1)
    output, output_bias = mlp.linear_fc2(swiglu(wide if bias is None else wide + bias, scale))
    if scale is not None and output_bias is not None:
        return output + output_bias * scale, None
    return output, output_bias
