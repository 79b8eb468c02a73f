"""megatron-core's parallel linear layers, whose weight gradients can be put off.

A zero-bubble schedule computes the gradient of a chunk's input first, because the stage before
waits for it, and the weight gradients later, when the rank would be idle (arXiv:2401.10241). Within
`DeferredWeightGradients.collect` the backward pass of these layers leaves its weight gradients to
a later call of `compute`; elsewhere they are megatron-core's layers, bit for bit. A layer may hold
an adapter (see `models.lora`), whose output it adds to its own, and may multiply in 8 bits (see
`models.fp8`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    _gather_along_first_dim,
    _reduce_scatter_along_first_dim,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.models.fp8.linear import Fp8Call, fp8_linear

Key = tuple[int, int]


class DeferredWeightGradients:
    """Weight gradients that wait, by micro-batch and stage."""

    def __init__(self) -> None:
        self._waiting: dict[Key, list[Callable[[], None]]] = {}
        self._collecting: list[Callable[[], None]] | None = None

    @contextmanager
    def collect(self, key: Key) -> Iterator[None]:
        """Put off the weight gradients of the backward passes within."""
        self._collecting = self._waiting.setdefault(key, [])
        try:
            yield
        finally:
            self._collecting = None

    @property
    def collecting(self) -> bool:
        return self._collecting is not None

    def add(self, compute: Callable[[], None]) -> None:
        """Put off one weight gradient; at once where nothing is collected."""
        if self._collecting is None:
            compute()
        else:
            self._collecting.append(compute)

    def add_gradient(self, parameter: Tensor, compute: Callable[[], Tensor]) -> None:
        """Put off the gradient of a weight, which is then added to what the weight has."""
        self.add(lambda: _accumulate(parameter, compute()))

    def compute(self, key: Key) -> None:
        """Compute what was put off under a key."""
        with torch.no_grad():
            for compute in self._waiting.pop(key, ()):
                compute()


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add to the data-parallel gradient buffer, or to ``weight.grad`` where there is none."""
    if hasattr(weight, "main_grad"):
        weight.main_grad.add_(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


class _LinearWithDeferredWeightGradient(torch.autograd.Function):
    """``y = x W^T + b``; the weight is hidden from autograd, its gradient goes to the queue."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        bias: Tensor | None,
        held: tuple[Tensor, DeferredWeightGradients],
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup,
    ) -> Tensor:
        weight = held[0]
        ctx.save_for_backward(input, weight)
        ctx.parameter, ctx.queue = held
        ctx.use_bias = bias is not None
        ctx.allreduce_dgrad = allreduce_dgrad
        ctx.sequence_parallel = sequence_parallel
        ctx.tp_group = tp_group
        total = _gather_along_first_dim(input, tp_group) if sequence_parallel else input
        output = torch.matmul(total, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        entered, weight = ctx.saved_tensors
        parameter, group, sequence_parallel = ctx.parameter, ctx.tp_group, ctx.sequence_parallel
        grad_input = grad_output.matmul(weight)
        if sequence_parallel:
            grad_input = _reduce_scatter_along_first_dim(grad_input, group)
        elif ctx.allreduce_dgrad:
            torch.distributed.all_reduce(grad_input, group=group)

        def weight_gradient() -> Tensor:
            total = _gather_along_first_dim(entered, group) if sequence_parallel else entered
            return grad_output.flatten(0, -2).t().matmul(total.flatten(0, -2))

        ctx.queue.add_gradient(parameter, weight_gradient)
        grad_bias = grad_output.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
        return grad_input, grad_bias, None, None, None, None


class _ParallelLinear:
    """Mixin over megatron-core's parallel linear layers."""

    config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lora: Any = None
        """The adapter that `models.lora` may put here."""
        self.fp8: Any = None
        """The scaling of 8-bit products that `models.fp8` may put here."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The layer's output, plus the adapter's, and the bias that the caller is to add."""
        output, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        return (output if self.lora is None else output + self.lora(input_)), bias

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The layer's shards; the adapter knows how its own are cut."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        if self.lora is not None:
            adapter = self.lora.sharded_state_dict(f"{prefix}lora.", sharded_offsets, metadata)
            state.update(adapter)
        return state

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        queue = getattr(self.config, "weight_gradients", None)
        # Without a gradient for the input there would be no backward pass to collect from.
        if not (weight.requires_grad and input.requires_grad):
            queue = None
        if self.fp8 is not None:
            return self._in_8_bits(input, weight, queue, **kwargs)
        if queue is None:
            output: Tensor = super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
            return output
        result: Tensor = _LinearWithDeferredWeightGradient.apply(  # type: ignore[no-untyped-call]
            input,
            kwargs["bias"],
            (weight, queue),
            kwargs["allreduce_dgrad"],
            kwargs["sequence_parallel"],
            kwargs["tp_group"],
        )
        return result

    def _in_8_bits(
        self,
        input: Tensor,
        weight: Tensor,
        queue: DeferredWeightGradients | None,
        *,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup | None,
        **_of_fused_kernels: Any,
    ) -> Tensor:
        call = Fp8Call(
            self.fp8,
            tp_group,
            sequence_parallel,
            allreduce_dgrad,
            weight,
            queue,
            getattr(self.config, "adds_in_place", False),
        )
        return fp8_linear(input, weight, bias, call)


class ColumnParallelLinear(_ParallelLinear, tensor_parallel.ColumnParallelLinear):  # type: ignore[misc]
    """Y = X A with A cut along its columns; see the module."""


class OutputLayer(ColumnParallelLinear):
    """The output head, which also gives its weight to losses that make the logits themselves.

    They get it by a call of the module, for whose sake data parallelism waits for the weight.
    """

    def forward(
        self, input_: Tensor | None, *args: Any, weight_only: bool = False, **kwargs: Any
    ) -> Any:
        """Logits and bias, or with ``weight_only`` this rank's weight ``[v/tp, h]``."""
        if weight_only:
            given = kwargs.get("weight")
            return self.weight if given is None else given
        assert input_ is not None
        return super().forward(input_, *args, **kwargs)


class RowParallelLinear(_ParallelLinear, tensor_parallel.RowParallelLinear):  # type: ignore[misc]
    """Y = X A with A cut along its rows; see the module."""
