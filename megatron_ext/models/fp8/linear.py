"""``y = x W^T + b`` with its three products in 8 bits; `passes` counts what it costs."""

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
from megatron_ext.models.fp8.parts import Role
from megatron_ext.models.fp8.product import product
from megatron_ext.models.fp8.scaling import Scaling
from megatron_ext.models.main_grad import handed_over

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
        adds_to_main_grad: add the weight's gradient to its ``main_grad``, where it has one.
    """

    scaling: Scaling
    tp_group: ProcessGroup | None
    sequence_parallel: bool
    allreduce_dgrad: bool
    parameter: Tensor
    queue: DeferredWeightGradients | None
    adds_to_main_grad: bool = False

    @property
    def trains(self) -> bool:
        """The weight wants a gradient."""
        return self.parameter.requires_grad and torch.is_grad_enabled()


def fp8_linear(input: Tensor, weight: Tensor, bias: Tensor | None, call: Fp8Call) -> Tensor:
    """The layer's output ``[s, b, out/tp]``.

    Args:
        input: ``[s, b, in]`` as the layer's products take it, or ``[s/tp, b, in]`` under sequence
            parallelism. Any dimensions but the last.
        weight: ``[out, in]`` on this rank.
        bias: ``[out]``.
        call: see `Fp8Call`.
    """
    trains = call.trains
    if call.queue is not None:
        weight = weight.detach()
    output: Tensor = _Fp8Linear.apply(input, weight, bias, call, trains)  # type: ignore[no-untyped-call]
    return output


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: Fp8Call, trains: bool
    ) -> Tensor:
        total, kept = _entered(input, call, trains)
        kernel = call.scaling.weight(weight).rows
        output = product(total, kernel, input.dtype, fast=True)
        ctx.save_for_backward(weight, kernel.scale, *kept)
        ctx.call, ctx.trains = call, trains
        ctx.use_bias = bias is not None
        # Not a view, to which megatron-core's experts could not add their bias in place.
        shape = [-1, *input.shape[1:-1], weight.size(0)]
        shaped: Tensor = torch.ops.aten._unsafe_view(output, shape)
        return shaped if bias is None else shaped + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        weight, weight_scale, *kept = ctx.saved_tensors
        call: Fp8Call = ctx.call
        scaling = call.scaling
        flat = grad_output.flatten(0, -2)
        columns = ctx.trains and scaling.config.fp8_wgrad
        gradient = scaling.pair(flat, Role.GRADIENT, columns=columns)
        kernel = scaling.weight_columns(weight, weight_scale)
        grad_input = product(gradient.rows, kernel, grad_output.dtype)
        grad_input = grad_input.view(*grad_output.shape[:-1], weight.size(1))
        sent = None
        if call.sequence_parallel:
            grad_input = _reduce_scatter_along_first_dim(grad_input, call.tp_group)
        elif call.allreduce_dgrad:
            sent = torch.distributed.all_reduce(grad_input, group=call.tp_group, async_op=True)
        grad_weight = None
        if ctx.trains:
            compute = _weight_gradient(call, flat, gradient.columns, kept)
            grad_weight = _given(compute, call)
        if sent is not None:
            sent.wait()
        grad_bias = flat.sum(dim=0) if ctx.use_bias else None
        return grad_input, grad_weight, grad_bias, None, None


def _entered(input: Tensor, call: Fp8Call, trains: bool) -> tuple[Quantized, tuple[Tensor, ...]]:
    """All tokens of the input, and what the backward pass needs of it.

    That is its transpose in 8 bits, half of what the input takes. Under sequence parallelism it is
    this rank's rows in 8 bits, which are gathered again; without ``--fp8-wgrad`` the input.
    """
    scaling, flat = call.scaling, input.flatten(0, -2)
    in_8_bits = trains and scaling.config.fp8_wgrad
    kept: tuple[Tensor, ...] = (input,) if trains and not in_8_bits else ()
    if not call.sequence_parallel:
        pair = scaling.pair(flat, Role.INPUT, columns=in_8_bits)
        if pair.columns is not None:
            kept = pair.columns.values, pair.columns.scale
        return pair.rows, kept
    assert call.tp_group is not None
    rows = scaling.rows(flat, Role.INPUT)
    if in_8_bits:
        across = scaling.across(flat, Role.INPUT, rows)
        kept = across.values, across.scale
    return rows.gathered(call.tp_group), kept


def _weight_gradient(
    call: Fp8Call, flat: Tensor, gradient: Quantized | None, kept: list[Tensor]
) -> Callable[[torch.dtype], Tensor]:
    """What computes the gradient ``[out, in]`` of the weight, in a dtype.

    Args:
        call: of the layer.
        flat: gradient of the output ``[tokens, out]``.
        gradient: its transpose in 8 bits; None without ``--fp8-wgrad``.
        kept: as `_entered` gives.
    """

    def from_values(dtype: torch.dtype) -> Tensor:
        assert gradient is not None
        entered = Quantized(kept[0], kept[1])
        if call.sequence_parallel:
            assert call.tp_group is not None
            entered = entered.gathered(call.tp_group).transposed()
        return product(gradient, entered, dtype)

    def from_input(dtype: torch.dtype) -> Tensor:
        total = kept[0]
        if call.sequence_parallel:
            total = _gather_along_first_dim(total, call.tp_group)
        return flat.t().matmul(total.flatten(0, -2)).to(dtype)

    return from_input if gradient is None else from_values


def _given(compute: Callable[[torch.dtype], Tensor], call: Fp8Call) -> Tensor | None:
    """Put the weight's gradient where it belongs; what autograd gets of it."""
    weight = call.parameter
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    adds = main_grad is not None and call.adds_to_main_grad
    # The product cannot add by itself; in the buffer's float32 nothing is rounded in between.
    dtype = main_grad.dtype if main_grad is not None and adds else weight.dtype
    if call.queue is not None:
        call.queue.add_gradient(weight, lambda: compute(dtype))
        return None
    if main_grad is None or not adds:
        return compute(dtype)
    main_grad.add_(compute(dtype))
    return handed_over(weight)
