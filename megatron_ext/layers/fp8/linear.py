"""The linear layer ``y = x W^T + b`` with its three matrix products in 8 bits.

`fp8_linear` is the layer. `KeptWeights` makes each layer cast its weight to 8 bits only once in a
step. `AmaxHistories` updates the scales of ``--fp8-recipe delayed`` after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    _gather_along_first_dim,
    _reduce_scatter_along_first_dim,
)
from torch import Tensor

from megatron_ext.device.streams import HostCopy
from megatron_ext.layers.fp8.matrices import Quantized, product
from megatron_ext.layers.fp8.scaling import DelayedScaling, Role, Scaling
from megatron_ext.layers.weight_gradients import (
    LinearCall,
    accumulate,
    gradient_placeholder,
    takes_overwrite,
    writable,
)


def fp8_linear(input: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """Return the output ``[s, b, out]`` of a layer whose weight on this rank is ``[out, in]``.

    The input is ``[s, b, in]``, or ``[s/tp, b, in]`` under sequence parallelism; it may have any
    number of leading dimensions. The bias is ``[out]``. ``call`` holds the layer's scales
    (``call.scaling``), and says where the weight's gradient goes. If ``call.scaling.activation`` is
    set, this function first applies that activation to the input.
    """
    trains = call.parameter.requires_grad and torch.is_grad_enabled()
    if call.queue is not None:
        weight = weight.detach()
    output: Tensor = _Fp8Linear.apply(input, weight, bias, call, trains)  # type: ignore[no-untyped-call]
    return output


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, trains: bool
    ) -> Tensor:
        total, kept = _entered(input, call, trains)
        kernel = call.scaling.weight(weight).rows
        output = product(total, kernel, input.dtype, fast=True)
        ctx.activation = call.scaling.activation
        wide = None if ctx.activation is None else input
        ctx.save_for_backward(weight, kernel.scale, wide, *kept)
        ctx.call = call
        ctx.trains = trains
        ctx.use_bias = bias is not None
        # Not a view, because megatron-core's experts add their bias in place.
        shape = [-1, *input.shape[1:-1], weight.size(0)]
        shaped: Tensor = torch.ops.aten._unsafe_view(output, shape)
        return shaped if bias is None else shaped + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        weight, weight_scale, wide, *kept = ctx.saved_tensors
        call: LinearCall = ctx.call
        scaling: Scaling = call.scaling
        flat = grad_output.flatten(0, -2)
        columns = ctx.trains and scaling.config.fp8_wgrad
        gradient = scaling.gradient(grad_output, columns=columns)
        kernel = scaling.weight_columns(weight, weight_scale)
        grad_input = product(gradient.rows, kernel, grad_output.dtype)
        sent = None
        if wide is None:
            grad_input = grad_input.view(*grad_output.shape[:-1], weight.size(1))
        elif ctx.needs_input_grad[0]:
            grad_input = ctx.activation.hand_over(grad_input, wide.flatten(0, -2), wide.shape)
        if call.sequence_parallel:
            grad_input = _reduce_scatter_along_first_dim(grad_input, call.tp_group)
        elif call.allreduce_dgrad:
            sent = torch.distributed.all_reduce(grad_input, group=call.tp_group, async_op=True)
        grad_weight = None
        if ctx.trains:
            compute = partial(_weight_gradient, call, flat, gradient.columns, kept)
            grad_weight = _given(compute, call)
        if sent is not None:
            sent.wait()
        grad_bias = flat.sum(dim=0) if ctx.use_bias else None
        return grad_input, grad_weight, grad_bias, None, None


def _entered(
    input: Tensor, call: LinearCall, trains: bool
) -> tuple[Quantized, tuple[Tensor | None, ...]]:
    """Return the input of the product in 8 bits, and the tensors to save for the backward pass.

    The first result has all tokens: under sequence parallelism, it is gathered from the ranks. For
    the weight's gradient, the transposed 8-bit input is saved, or without ``--fp8-wgrad`` the input
    itself. Under sequence parallelism, only this rank's tokens are saved, not transposed; the
    backward pass gathers and transposes them. If the weight needs no gradient (``trains`` is
    False), nothing is saved.
    """
    scaling = call.scaling
    flat = input.flatten(0, -2)
    in_8_bits = trains and scaling.config.fp8_wgrad
    kept: tuple[Tensor | None, ...] = (input,) if trains and not in_8_bits else ()
    if not call.sequence_parallel:
        if scaling.activation is None:
            pair = scaling.pair(flat, Role.INPUT, columns=in_8_bits)
        else:
            pair = scaling.activation.cast(flat, scaling, columns=in_8_bits)
        if pair.columns is not None:
            kept = _tensors_of(pair.columns)
        return pair.rows, kept
    assert call.tp_group is not None
    rows = scaling.rows(flat, Role.INPUT)
    if in_8_bits:
        across = scaling.across(flat, Role.INPUT, rows)
        kept = _tensors_of(across)
    return rows.gathered(call.tp_group), kept


def _tensors_of(matrix: Quantized) -> tuple[Tensor | None, ...]:
    return matrix.values, matrix.scale, matrix.inverse


def _weight_gradient(
    call: LinearCall,
    flat: Tensor,
    gradient: Quantized | None,
    kept: list[Tensor],
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Return the weight's gradient ``[out, in]`` in ``dtype``; if ``out`` is given, write it there.

    ``flat`` is the output's gradient ``[tokens, out]``; ``gradient`` is the transpose of ``flat``
    in 8 bits, None without ``--fp8-wgrad``. ``kept`` holds the tensors that `_entered` saved.
    """
    if gradient is None:
        total = kept[0]
        if call.sequence_parallel:
            total = _gather_along_first_dim(total, call.tp_group)
        result = flat.t().matmul(total.flatten(0, -2))
        return result.to(dtype) if out is None else out.copy_(result)
    entered = Quantized(*kept)
    if call.sequence_parallel:
        assert call.tp_group is not None
        entered = entered.gathered(call.tp_group).transposed()
    return product(gradient, entered, dtype, out=out)


def _given(compute: Callable[..., Tensor], call: LinearCall) -> Tensor | None:
    """Compute the weight's gradient, and return what autograd must pass on for the weight.

    If the gradient is deferred, the computation is added to ``call.queue``, and the result is None.
    If ``call.in_place`` asks to add the gradient to the weight's ``main_grad``, the result is a
    placeholder. Otherwise it is the gradient. ``compute`` takes the gradient's dtype and,
    optionally, a matrix to write it to; it returns the gradient.
    """
    weight = call.parameter
    main_grad: Tensor | None = getattr(weight, "main_grad", None) if call.in_place else None
    if call.queue is not None:
        call.queue.add(lambda: _add(compute, weight, main_grad))
        return None
    if main_grad is None:
        return compute(weight.dtype)
    _add(compute, weight, main_grad)
    return gradient_placeholder(weight)


def _add(compute: Callable[..., Tensor], weight: Tensor, main_grad: Tensor | None) -> None:
    """Compute a weight's gradient and add it to ``main_grad``, the weight's gradient buffer.

    The gradient is computed in the buffer's dtype. A product that overwrites last step's gradient
    is written directly to the buffer. Others need a separate addition, since ``torch._scaled_mm``
    cannot add to its output (its beta is 0). If ``main_grad`` is None, the gradient is rounded to
    the weight's dtype, and `accumulate` adds it to the weight's ``main_grad`` or ``grad``.
    """
    if main_grad is None:
        accumulate(weight, compute(weight.dtype))
    elif takes_overwrite(weight):
        compute(main_grad.dtype, main_grad)
    else:
        writable(main_grad).add_(compute(main_grad.dtype))


class KeptWeights:
    """A cache of the 8-bit weights of a rank's model chunks, valid while the weights stay constant.

    Inside `kept`, a layer casts its weight only at its first use, and keeps both the 8-bit weight
    and its transpose. This takes 2 bytes per parameter of an 8-bit layer, in addition to the
    bfloat16 weight.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._scalings = [
            module for chunk in chunks for module in chunk.modules() if isinstance(module, Scaling)
        ]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Reuse 8-bit weights inside the block, where the weights must not change."""
        try:
            for scaling in self._scalings:
                scaling.keeps_weight = True
            yield
        finally:
            for scaling in self._scalings:
                scaling.keeps_weight, scaling.kept_weight = False, None


class AmaxHistories:
    """The histories of the largest magnitudes (amax) of the tensors in a rank's 8-bit layers.

    Only delayed scaling has histories; with another recipe there are none, and the methods do
    nothing.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        modules = (module for chunk in chunks for module in chunk.modules())
        self.scalings = [module for module in modules if isinstance(module, DelayedScaling)]
        """The delayed scalings, in the same order on all ranks of a pipeline stage."""
        self._pending: tuple[list[DelayedScaling], HostCopy] | None = None

    def marks(self) -> tuple[Any, list[bool]]:
        """Return what the host knows about the histories, a pair that `set_marks` restores.

        The second element is `DelayedScaling.has_history` of each layer: whether all its tensors
        are known to have a history. The first element tells this of layers for which it was
        still False at the last `advance`. It is a copy from the device, perhaps still running, that
        the next `advance` reads; None if there is no such copy.
        """
        return self._pending, [scaling.has_history for scaling in self.scalings]

    def set_marks(self, marks: tuple[Any, list[bool]]) -> None:
        """Restore the state that `marks` returned before a step, to repeat that step."""
        self._pending, has_history = marks
        for scaling, before in zip(self.scalings, has_history, strict=True):
            scaling.has_history = before

    def forget(self) -> None:
        """Drop the pending copy (see `marks`); call this after loading other histories."""
        self._pending = None

    @torch.no_grad()
    def advance(self) -> None:
        """Append a training step's largest magnitudes to the histories, and update the scales.

        All ranks of a pipeline stage call this together. If a tensor was all zeros or not finite,
        its history and its scale do not change.
        """
        if self._pending is not None:
            scalings, answer = self._pending
            self._pending = None
            for scaling, whole in zip(scalings, answer.read(), strict=True):
                scaling.has_history |= bool(whole)
        for experts in (False, True):
            scalings = [x for x in self.scalings if x.parts.may_idle == experts]
            if scalings:
                _advance(scalings)
        # The next step reads which layers have whole histories, to avoid waiting for the device
        # now.
        lacking = [x for x in self.scalings if not (x.has_history or x.parts.may_idle)]
        if lacking:
            histories = torch.stack([scaling.amax_history for scaling in lacking])
            self._pending = lacking, HostCopy(histories.any(dim=1).all(dim=1))


def _advance(scalings: Sequence[DelayedScaling]) -> None:
    """Append the step's largest magnitudes to the histories of some layers, and update the scales.

    All layers in ``scalings`` must reduce their magnitudes over the same groups of ranks.
    """
    amax = torch.stack([scaling.amax for scaling in scalings])
    # Collectives do not define the comparison of NaN, so replace it by infinity.
    amax = torch.where(amax.isfinite(), amax, torch.inf)
    for group in scalings[0].parts.of_step():
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    before = torch.stack([scaling.amax_history for scaling in scalings])
    shifted = torch.cat([amax.unsqueeze(1), before[:, :-1]], dim=1)
    counts = (amax.isfinite() & (amax > 0)).unsqueeze(1)
    after = torch.where(counts, shifted, before)
    scales = scalings[0].scale_of(after)
    torch._foreach_copy_([x.amax_history for x in scalings], list(after.unbind()))
    torch._foreach_copy_([x.scale for x in scalings], list(scales.unbind()))
    torch._foreach_copy_([x.inverse for x in scalings], list(scales.reciprocal().unbind()))
    torch._foreach_zero_([x.amax for x in scalings])
