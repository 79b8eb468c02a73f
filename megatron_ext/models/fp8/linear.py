"""``y = x W^T + b`` with its three products in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.mappings import (
    _gather_along_first_dim,
    _reduce_scatter_along_first_dim,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.models.fp8.formats import Quantized
from megatron_ext.models.fp8.product import product
from megatron_ext.models.fp8.scaling import Role, Scaling

if TYPE_CHECKING:
    from megatron_ext.models.linear import DeferredWeightGradients


@dataclass(frozen=True)
class Fp8Call:
    """What one layer's products are made with.

    Attributes:
        scaling: of the layer.
        tp_group: ranks that hold the other parts of the weight; None where nothing is sent.
        sequence_parallel: the input is gathered, and its gradient reduce-scattered, along s.
        allreduce_dgrad: the input's gradient is summed over the ranks.
        parameter: the weight, hidden from autograd, whose gradient goes to ``queue``.
        queue: where a zero-bubble schedule puts weight gradients off; None lets autograd have them.
    """

    scaling: Scaling
    tp_group: ProcessGroup | None
    sequence_parallel: bool
    allreduce_dgrad: bool
    parameter: Tensor
    queue: DeferredWeightGradients | None


def fp8_linear(input: Tensor, weight: Tensor, bias: Tensor | None, call: Fp8Call) -> Tensor:
    """The layer's output ``[s, b, out/tp]``.

    Args:
        input: ``[s, b, in]`` as the layer's products take it, or ``[s/tp, b, in]`` under sequence
            parallelism.
        weight: ``[out, in]`` on this rank.
        bias: ``[out]``.
        call: see `Fp8Call`.
    """
    if call.queue is not None:
        weight = weight.detach()
    output: Tensor = _Fp8Linear.apply(input, weight, bias, call)  # type: ignore[no-untyped-call]
    return output


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: Fp8Call
    ) -> Tensor:
        scaling = call.scaling
        entered = scaling.rows(input.flatten(0, -2), Role.INPUT)
        kernel = scaling.rows(weight, Role.WEIGHT)
        total = _gathered(entered, call)
        output = product(total, kernel, input.dtype, fast=True)
        # Of the weight only the scale: to cast it again costs less than to keep it twice.
        kept = (input,) if scaling.keeps_input else (entered.values, entered.scale)
        ctx.save_for_backward(weight, kernel.scale, *kept)
        ctx.call = call
        ctx.use_bias = bias is not None
        output = output.view(-1, *input.shape[1:-1], weight.size(0))
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        weight, weight_scale, *kept = ctx.saved_tensors
        call: Fp8Call = ctx.call
        flat = grad_output.flatten(0, -2)
        gradient = call.scaling.rows(flat, Role.GRADIENT)
        kernel = call.scaling.columns(weight, Role.WEIGHT, weight_scale)
        grad_input = product(gradient, kernel, grad_output.dtype)
        grad_input = grad_input.view(*grad_output.shape[:-1], weight.size(1))
        sent = None
        if call.sequence_parallel:
            grad_input = _reduce_scatter_along_first_dim(grad_input, call.tp_group)
        elif call.allreduce_dgrad:
            sent = torch.distributed.all_reduce(grad_input, group=call.tp_group, async_op=True)
        wanted = call.queue is not None or ctx.needs_input_grad[1]
        grad_weight = _weight_gradient(call, flat, gradient, kept) if wanted else None
        if call.queue is not None and grad_weight is not None:
            call.queue.add_gradient(call.parameter, grad_weight)
            grad_weight = None
        result = None if grad_weight is None else grad_weight()
        if sent is not None:
            sent.wait()
        return grad_input, result, flat.sum(dim=0) if ctx.use_bias else None, None


def _gathered(entered: Quantized, call: Fp8Call) -> Quantized:
    """All tokens of the input, sent in 8 bits."""
    if not call.sequence_parallel:
        return entered
    assert call.tp_group is not None
    return entered.gathered(call.tp_group)


def _weight_gradient(
    call: Fp8Call, flat: Tensor, gradient: Quantized, kept: list[Tensor]
) -> Callable[[], Tensor]:
    """What computes the gradient ``[out, in]`` of the weight, in its dtype.

    Args:
        call: of the layer.
        flat: gradient of the output ``[tokens, out]``.
        gradient: the same in 8 bits.
        kept: the input on this rank, or its 8-bit values and their scale.
    """
    scaling, dtype = call.scaling, call.parameter.dtype

    def from_values() -> Tensor:
        entered = _gathered(Quantized(kept[0], kept[1]), call)
        return product(gradient.transposed(), entered.transposed(), dtype)

    def from_input() -> Tensor:
        total = kept[0]
        if call.sequence_parallel:
            total = _gather_along_first_dim(total, call.tp_group)
        total = total.flatten(0, -2)
        if not scaling.config.fp8_wgrad:
            return flat.t().matmul(total)
        a = scaling.columns(flat, Role.GRADIENT, gradient.scale)
        b = scaling.columns(total, Role.INPUT, gradient.scale)
        return product(a, b, dtype)

    return from_input if scaling.keeps_input else from_values
