"""The experts of a rank computed together, instead of one expert after the other.

On a GPU, their products are grouped: a single kernel of torch multiplies the tokens of every expert
by that expert's matrix. It reads from device memory at which row the tokens of each expert end. The
weights remain separate parameters with their names in checkpoints: they are copied into one stacked
tensor in each forward pass, and again for the gradient of the tokens. Grouping pays off for many
small experts, whose single products are too small to fill a GPU.

On a CPU, each expert has a product of its own, but all else is computed for all experts at once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from megatron_ext.layers import onednn, pointwise
from megatron_ext.layers.compiled import fusions_of
from megatron_ext.layers.hooks import call_pre_hooks
from megatron_ext.layers.subclass import specialize
from megatron_ext.layers.weight_gradients import (
    DeferredWeightGradients,
    accumulate,
    gradient_placeholder,
    takes_overwrite,
    writable,
)

logger = logging.getLogger(__name__)

ALIGNMENT = 16
"""The grouped kernel requires rows whose length in bytes is a multiple of this."""

ROWS = 16
"""oneDNN multiplies the largest multiple of this many tokens, and torch the rest of an expert's.

oneDNN compiles code for each new number of rows, which takes longer than a small product, and an
expert's tokens are as many as never before.
"""

HOPPER = 9
"""Major compute capability of the GPUs on which the grouped kernel is used."""


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    """Return whether torch's grouped 16-bit kernel is usable on this GPU; if not, log a warning.

    It can be used on Hopper from torch 2.10 on, the first version with a public ``grouped_mm``. In
    older versions an expert without tokens could make the kernel hang. On Blackwell the gradient of
    such an expert is not zero (pytorch/pytorch, issue 172439). On other GPUs torch has no such
    kernel and computes one product after the other.
    """
    public = hasattr(F, "grouped_mm")
    capability = torch.cuda.get_device_capability(device)
    if public and capability[0] == HOPPER:
        return True
    logger.warning(
        "`--moe-grouped-gemm` needs a Hopper GPU and torch 2.10; with compute capability %d.%d and "
        "torch %s experts run one after the other.",
        *capability,
        torch.__version__,
    )
    return False


@dataclass(frozen=True)
class _Call:
    """The experts' weights for one grouped product, and where to put the weights' gradients.

    Attributes:
        weights: one for each expert, ``[out, in]``.
        queue: queue that computes the weight gradients later; None computes them in the backward
            pass.
        in_place: whether to add the gradients to the weights' ``main_grad``, if they have one.
        by_onednn: whether oneDNN multiplies, on a CPU.
    """

    weights: Sequence[Tensor]
    queue: DeferredWeightGradients | None
    in_place: bool
    by_onednn: bool = False

    def add(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Deliver the weights' gradients ``[out, in]``; return what autograd gets for each weight.

        - With a queue, autograd is already done with this product. Each gradient is added to the
          weight's ``main_grad``, or to its ``grad`` if it has none. The results are None.
        - Without a queue, if ``in_place`` is set and all weights have a ``main_grad``, the gradient
          of each is added to it. The results are placeholders, which autograd needs.
        - Otherwise nothing is added, and the results are the gradients.
        """
        if self.in_place and all(hasattr(weight, "main_grad") for weight in self.weights):
            buffers: Any = [writable(x.main_grad) for x in self.weights]  # type: ignore[attr-defined]
            stale = [
                x
                for x, weight in zip(buffers, self.weights, strict=True)
                if takes_overwrite(weight)
            ]
            if len(stale) == len(buffers):
                torch._foreach_copy_(buffers, gradients)
            else:
                if stale:
                    torch._foreach_zero_(stale)
                torch._foreach_add_(buffers, gradients)
            if self.queue is None:
                return tuple(gradient_placeholder(weight) for weight in self.weights)
        elif self.queue is None:
            return gradients
        else:
            for weight, gradient in zip(self.weights, gradients, strict=True):
                accumulate(weight, gradient)
        return (None,) * len(self.weights)

    @property
    def wants_gradients(self) -> bool:
        """Return whether the weights get gradients, now or later; if not, they are frozen."""
        return self.queue is not None or self.weights[0].requires_grad

    def deliver(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor | None, ...]:
        """Compute and `add` the weights' gradients, with a queue later; do nothing if frozen.

        Return what autograd gets for each weight.
        """
        if self.queue is not None:
            self.queue.add(lambda: self.add(compute()))
        elif self.wants_gradients:
            return self.add(compute())
        return (None,) * len(self.weights)


class _GroupedProduct(torch.autograd.Function):
    """Products ``x_e W_e^T`` for each expert e, whose tokens are adjacent in ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, call: _Call, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x if call.wants_gradients else None, ends)
        ctx.call = call
        stacked = torch.stack([weight.detach() for weight in weights])
        return torch._grouped_mm(x, stacked.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, ends = ctx.saved_tensors
        call: _Call = ctx.call
        gradient = gradient.contiguous()
        x_gradient = None
        if ctx.needs_input_grad[0]:
            stacked = torch.stack([weight.detach() for weight in call.weights])
            x_gradient = torch._grouped_mm(gradient, stacked, offs=ends)

        def compute() -> tuple[Tensor, ...]:
            # In these layouts an expert may have any number of tokens, even none. The kernel writes
            # only 16 bits.
            return torch._grouped_mm(gradient.t(), x, offs=ends).unbind()

        return x_gradient, None, None, *call.deliver(compute)


class _ProductPerExpert(torch.autograd.Function):
    """The same products one after the other, for CPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, call: _Call, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x if call.wants_gradients else None)
        ctx.call = call
        last: list[int] = ends.tolist()
        ctx.counts = [end - start for start, end in zip([0, *last], last, strict=False)]
        return _product_per_expert(x, ctx.counts, [x.detach() for x in weights], call.by_onednn)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        call: _Call = ctx.call
        counts: list[int] = ctx.counts
        x_gradient = None
        if ctx.needs_input_grad[0]:
            weights = [weight.detach().t() for weight in call.weights]
            x_gradient = _product_per_expert(gradient, counts, weights, call.by_onednn)

        def compute() -> tuple[Tensor, ...]:
            pairs = zip(torch.split(gradient, counts), torch.split(x, counts), strict=True)
            return tuple(_weight_gradient(g, y, call.by_onednn) for g, y in pairs)

        return x_gradient, None, None, *call.deliver(compute)


def _product_per_expert(
    x: Tensor, counts: list[int], weights: Sequence[Tensor], by_onednn: bool
) -> Tensor:
    """Return ``x_e W_e^T`` for each expert e, joined; the first ``counts[0]`` rows are expert 0's.

    ``x`` is ``[tokens, in]``, and each of the weights ``[out, in]``.
    """
    products = []
    for rows, weight in zip(torch.split(x, counts), weights, strict=True):
        whole = len(rows) // ROWS * ROWS if by_onednn else 0
        if whole:
            products.append(onednn.multiply(rows[:whole], weight))
        if whole < len(rows):
            products.append(rows[whole:] @ weight.t())
    return torch.cat(products)


def _weight_gradient(gradient: Tensor, x: Tensor, by_onednn: bool) -> Tensor:
    """Return ``gradient^T x`` of an expert's tokens ``[tokens, out]`` and ``[tokens, in]``."""
    whole = len(x) // ROWS * ROWS if by_onednn else 0
    if not whole:
        return gradient.t() @ x
    product: Tensor = onednn.multiply(gradient[:whole].t(), x[:whole].t())
    return product.addmm_(gradient[whole:].t(), x[whole:]) if whole < len(x) else product


class JointExperts(SequentialMLP):  # type: ignore[misc]
    """megatron-core's `SequentialMLP`, which on a CPU computes only the products one by one.

    This is for float32. In 16 bits, megatron-core's own functions compute all of it, to round like
    Megatron-LM.
    """

    _product_function: Any = _ProductPerExpert

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the experts' outputs ``[tokens, h]``, and None because they include the biases.

        Args:
            permuted_local_hidden_states: tokens ``[tokens, h]``, sorted by expert.
            tokens_per_expert: number of each expert's tokens, ``[e]``.
            permuted_probs: factor of each token, ``[tokens]``.
        """
        x = permuted_local_hidden_states
        probs = permuted_probs
        config = self.config
        if not self._groups(x):
            result: tuple[Tensor, Tensor | None] = super().forward(x, tokens_per_expert, probs)
            return result
        call_pre_hooks(self.local_experts)
        if config.moe_apply_probs_on_input:
            x = (probs.unsqueeze(-1) * x).to(x.dtype)
            probs = torch.ones_like(probs)
        counts = tokens_per_expert.to(x.device, non_blocking=True)
        ends = counts.cumsum(0, dtype=torch.int32)
        scale = probs.unsqueeze(-1)
        activate: Any = pointwise.activated
        if not fusions_of(config).activation:
            activate = pointwise.activated.eager
        wide = self._product(x, ends, "linear_fc1")
        bias = self._biases(ends, "linear_fc1", wide)
        name = pointwise.NAMES[config.activation_func]
        limits = pointwise.limits_of(config)
        narrow = activate(wide, bias, scale, name, config.gated_linear_unit, *limits)
        output = self._product(narrow, ends, "linear_fc2")
        bias = self._biases(ends, "linear_fc2", output)
        return (output if bias is None else (output + bias * scale).to(output.dtype)), None

    def _groups(self, x: Tensor) -> bool:
        """Return whether the tokens ``x`` and all experts of this rank can be computed together."""
        linears = [
            x for expert in self.local_experts for x in (expert.linear_fc1, expert.linear_fc2)
        ]
        return (
            len(x) > 0
            and all(linear.fp8 is None and linear.quantized is None for linear in linears)
            and all(linear.lora is None or linear.lora.groups for linear in linears)
            and x.dtype == linears[0].weight.dtype
        )

    def _product(self, x: Tensor, ends: Tensor, name: str) -> Tensor:
        """Multiply the tokens of each expert by that expert's weight; return ``[tokens, out]``.

        The outputs of adapters are added.

        Args:
            x: tokens ``[tokens, in]``, sorted by expert.
            ends: index of the row after each expert's last token, ``[e]``.
            name: "linear_fc1" or "linear_fc2", the layer whose weights ``[out, in]`` to use.
        """
        linears = [getattr(expert, name) for expert in self.local_experts]
        weights = [linear.weight for linear in linears]
        trains = weights[0].requires_grad
        config = self.config
        queue = config.weight_gradients if trains and x.requires_grad else None
        by_onednn = onednn.takes(weights[0].numel(), x.dtype, x.device.type)
        call = _Call(weights, queue, trains and config.adds_in_place, by_onednn)
        # For deferred gradients, autograd must not see the weights.
        seen = weights if queue is None else [weight.detach() for weight in weights]
        product: Tensor = self._product_function.apply(x, ends, call, *seen)
        adapters = [linear.lora for linear in linears]
        if adapters[0] is None:
            return product
        multiply = functools.partial(self._multiplied, ends)
        return product + adapters[0].grouped(adapters, x, multiply)  # type: ignore[no-any-return]

    def _multiplied(self, ends: Tensor, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Return each expert's tokens times its matrix ``[out, in]``, whose gradient is autograd's.

        The other arguments are those of `_product`.
        """
        by_onednn = onednn.takes(weights[0].numel(), x.dtype, x.device.type)
        aligned = all(size * x.element_size() % ALIGNMENT == 0 for size in weights[0].shape)
        function = self._product_function if aligned else _ProductPerExpert
        product: Tensor = function.apply(x, ends, _Call(weights, None, False, by_onednn), *weights)
        return product

    def _biases(self, ends: Tensor, name: str, like: Tensor) -> Tensor | None:
        """Return the bias of each token's expert, ``[tokens, out]``; None without biases.

        Args:
            ends: index of the row after each expert's last token, ``[e]``.
            name: "linear_fc1" or "linear_fc2", the layer whose biases to use.
            like: tensor with the number of tokens, dtype and device of the result.
        """
        biases = [getattr(expert, name).bias for expert in self.local_experts]
        if biases[0] is None:
            return None
        rows = torch.arange(len(like), device=like.device)
        experts = torch.bucketize(rows, ends, right=True)
        chosen = experts.unsqueeze(1) == torch.arange(len(biases), device=like.device)
        # A product, because its gradient avoids a slow sum of many tokens into few rows.
        return chosen.to(like.dtype) @ torch.stack(biases)


class GroupedExperts(JointExperts):
    """The same with grouped products where they can be used."""

    _product_function = _GroupedProduct

    def _groups(self, x: Tensor) -> bool:
        sizes = {
            size
            for expert in self.local_experts
            for linear in (expert.linear_fc1, expert.linear_fc2)
            for size in linear.weight.shape
        }
        return (
            len(self.local_experts) > 1
            and super()._groups(x)
            and not any(size * x.element_size() % ALIGNMENT for size in sizes)
            and (not x.is_cuda or (x.dtype == torch.bfloat16 and _has_kernel(x.device)))
        )


def join_experts(layer: torch.nn.Module) -> None:
    """Make the experts of an MoE layer compute together, without changing their parameters.

    Their products are grouped if ``groups_experts`` of the TransformerConfig is set.
    """
    experts = layer.experts
    assert isinstance(experts, torch.nn.Module)
    if type(experts) is SequentialMLP:
        groups = getattr(experts.config, "groups_experts", False)
        specialize(experts, GroupedExperts if groups else JointExperts)
