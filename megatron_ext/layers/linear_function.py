"""Functions of layers whose weight gradients are deferred, or added to the gradient buffer.

In a linear layer, the communication of tensor parallelism overlaps the matrix products of the
backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from megatron_ext.layers import onednn
from megatron_ext.layers.weight_gradients import (
    LinearCall,
    accumulate,
    add_weight_gradient,
    expect_additions,
    gradient_placeholder,
    writable,
)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """Return ``input W^T + bias``; ``call`` says where the gradient of the weight goes."""
    # For a deferred gradient, autograd must not see the weight.
    seen = weight if call.queue is None else weight.detach()
    result: Tensor = _Linear.apply(input, seen, bias, call)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, _weight: Tensor, bias: Tensor | None, call: LinearCall
    ) -> Tensor:
        ctx.save_for_backward(input)
        ctx.call = call
        ctx.use_bias = bias is not None
        total = input
        if call.sequence_parallel:
            total = mappings._gather_along_first_dim(input, call.tp_group)
        # With the detached weight, torch would multiply an input that is not contiguous one matrix
        # after the other, which rounds otherwise.
        output = _product(total, call.parameter, call)
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (entered,) = ctx.saved_tensors
        call: LinearCall = ctx.call
        queue = call.queue
        # Communication of the input, and then of its gradient, overlaps the matrix products.
        gather = None if queue is not None and queue.collecting else _gathered(entered, call)
        returned = None
        if ctx.needs_input_grad[0]:
            returned = _reduced(_product(grad_output, call.parameter.t(), call), call)
        grad_weight = None
        if gather is not None:
            grad_weight = _weight_gradient(call, grad_output, gather.get())
        elif queue is not None:
            queue.add(lambda: _weight_gradient(call, grad_output, _gathered(entered, call).get()))
        grad_bias = grad_output.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
        return None if returned is None else returned.get(), grad_weight, grad_bias, None


def _product(x: Tensor, weight: Tensor, call: LinearCall) -> Tensor:
    """Return ``x W^T`` for ``x`` ``[..., in]`` and ``W`` ``[out, in]``."""
    product: Tensor = onednn.multiply(x, weight) if call.by_onednn else x.matmul(weight.t())
    return product


class _Sent(NamedTuple):
    """The result of a collective that may still be running; `get` waits for it."""

    tensor: Tensor
    work: Any = None

    def get(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


def _gathered(part: Tensor, call: LinearCall) -> _Sent:
    """Start to gather the input of all tokens, unless ``part`` already holds all of them."""
    if not call.sequence_parallel or call.tp_group is None or call.tp_group.size() == 1:
        return _Sent(part)
    whole = part.new_empty(part.size(0) * call.tp_group.size(), *part.shape[1:])
    sends: Any = {"group": call.tp_group, "async_op": True}
    return _Sent(whole, dist.all_gather_into_tensor(whole, part.contiguous(), **sends))


def _reduced(whole: Tensor, call: LinearCall) -> _Sent:
    """Start to sum the input's gradient over the ranks if needed; keep only this rank's tokens."""
    group = call.tp_group
    if group is None or group.size() == 1:
        return _Sent(whole)
    sends: Any = {"group": group, "async_op": True}
    if call.sequence_parallel:
        part = whole.new_empty(whole.size(0) // group.size(), *whole.shape[1:])
        return _Sent(part, dist.reduce_scatter_tensor(part, whole.contiguous(), **sends))
    return _Sent(whole, dist.all_reduce(whole, **sends) if call.allreduce_dgrad else None)


def _weight_gradient(call: LinearCall, gradient: Tensor, total: Tensor) -> Tensor | None:
    """Compute the weight's gradient; add it to the buffer or return it, as ``call`` requires.

    ``gradient`` is the output's gradient ``[s, b, out]``; ``total`` is the input ``[s, b, in]`` of
    all tokens. The result is for autograd: the gradient, a placeholder, or None for a deferred
    gradient.
    """
    gradient = gradient.flatten(0, -2)
    total = total.flatten(0, -2)
    weight = call.parameter
    if call.in_place and hasattr(weight, "main_grad"):
        add_weight_gradient(weight, gradient, total)
        return None if call.queue is not None else gradient_placeholder(weight)
    product = _product(gradient.t(), total.t(), call)
    if call.queue is None:
        return product
    accumulate(weight, product)
    return None


def rows_of(weight: Tensor, indices: Tensor) -> Tensor:
    """Look up rows of ``weight``; the backward pass adds its gradient to ``main_grad``."""
    rows: Tensor = _Rows.apply(indices, weight)  # type: ignore[no-untyped-call]
    return rows


class _Rows(torch.autograd.Function):
    """Embedding lookup whose backward pass adds the gradient directly to ``main_grad``.

    So it needs no temporary gradient of the size of the whole embedding.
    """

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.main_grad = weight.main_grad  # type: ignore[attr-defined]
        expect_additions(weight)
        return torch.nn.functional.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        rows = gradient.flatten(0, -2).to(ctx.main_grad.dtype)
        # The public `index_put_` would synchronize to read the range of the indices. Both functions
        # add the gradients of a row in a fixed order; `index_add_` does not on GPUs.
        torch._index_put_impl_(
            writable(ctx.main_grad), [indices.flatten()], rows, accumulate=True, unsafe=True
        )
        return None, None
