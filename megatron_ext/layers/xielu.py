"""MLPs with xIELU, an activation function with weights of its own (arXiv:2411.13010)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.layers.initialization import device_of
from megatron_ext.layers.subclass import specialize

START = 0.8
"""Initial value of both factors, as in section 3 of the paper."""


class _Xielu(torch.autograd.Function):
    """Computes xIELU; keeps its input alone for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, positive: Tensor, negative: Tensor, beta: Tensor, eps: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, positive, negative, beta, eps)
        below = torch.expm1(torch.minimum(x, eps)) - x
        return torch.where(x > 0, positive * x * x, below * negative) + beta * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, positive, negative, beta, eps = ctx.saved_tensors
        above = x > 0
        slope = torch.where(x < eps, x.exp(), 0) - 1
        of_x = torch.where(above, 2 * positive * x, negative * slope) + beta
        below = torch.expm1(torch.minimum(x, eps)) - x
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        of_positive = torch.where(above, gradient * x * x, 0).sum(dtype=wide).to(positive.dtype)
        of_negative = torch.where(above, 0, gradient * below).sum(dtype=wide).to(negative.dtype)
        return (
            (gradient * of_x).to(x.dtype),
            of_positive.view_as(positive),
            of_negative.view_as(negative),
            None,
            None,
        )


class Xielu(MegatronModule):  # type: ignore[misc]
    """xIELU: ``p x^2 + b x`` for x > 0, else ``n (e^min(x, eps) - 1 - x) + b x``.

    Two weights decide the factors, p = softplus(alpha_p) and n = b + softplus(alpha_n). Buffers
    hold b and eps, as files of Hugging Face do.
    """

    def __init__(self, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        super().__init__(config)
        self.tp_group = tp_group
        device = device_of(config)
        beta = 0.5

        def number(value: float) -> Tensor:
            return torch.tensor([value], dtype=config.params_dtype, device=device)

        self.alpha_p = torch.nn.Parameter(number(math.log(math.expm1(START))))
        self.alpha_n = torch.nn.Parameter(number(math.log(math.expm1(START - beta))))
        self.register_buffer("beta", number(beta))
        self.register_buffer("eps", number(-1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """Return xIELU of each element of ``[..., f]``, f channels of this rank."""
        # Each rank applies the function to its own channels, so the weights' gradients add up.
        alpha_p = copy_to_tensor_model_parallel_region(self.alpha_p, group=self.tp_group)
        alpha_n = copy_to_tensor_model_parallel_region(self.alpha_n, group=self.tp_group)
        positive = F.softplus(alpha_p)
        negative = self.beta + F.softplus(alpha_n)
        output: Tensor = _Xielu.apply(  # type: ignore[no-untyped-call]
            x, positive, negative, self.beta, self.eps
        )
        return output


class XieluMLP(MLP):  # type: ignore[misc]
    """A dense MLP whose activation function is an `Xielu`.

    Attributes:
        adds_bias: as in `transformer_layer.MLP`.
    """

    activation_func: Xielu
    adds_bias: bool = False

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output ``[s, b, h]``, and None or a bias that the caller must add."""
        wide, bias = self.linear_fc1(hidden_states)
        activated = self.activation_func(wide if bias is None else wide + bias)
        output, output_bias = self.linear_fc2(activated)
        if self.adds_bias and output_bias is not None:
            return output + output_bias, None
        return output, output_bias


def use_xielu(mlp: torch.nn.Module, tp_group: ProcessGroup) -> None:
    """Give a dense MLP xIELU in place of its activation function; leave other modules alone."""
    if type(mlp) is MLP:
        specialize(mlp, XieluMLP)
        config: Any = mlp.config
        mlp.activation_func = Xielu(config, tp_group)
