"""Layers of all video networks: linear layers, embedders and modulation by the timestep.

Some blocks run two streams (text and image), or two branches (attention and MLP), on one joint
sequence. One collective gives the tensor-parallel ranks the inputs of both, and another sums the
outputs of both over the ranks, so the layers `ColumnPiece` and `RowPiece` do not communicate. If
each layer did, as in megatron-core, the block would communicate two to four times as often, and
under sequence parallelism the ranks would have to split each stream's tokens equally. The cost is
memory: under sequence parallelism the gathered input is kept for the backward pass; megatron-core
gathers it again.

Other networks have one stream, and run attention and MLP one after the other, so there is nothing
to combine. Their layers, built by `column` and `row`, do communicate. All of them, and
`Modulation`, take LoRA adapters (`layers.lora`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.layers.compiled import compiled
from megatron_ext.layers.initialization import Initialize, Marked
from megatron_ext.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ext.layers.replicated_linear import ReplicatedLinear
from megatron_ext.video.config.sizes import EPSILON
from megatron_ext.video.model.chunk import Blueprint


def uniform(config: TransformerConfig, bound: float) -> Initialize:
    """Return an initializer that draws uniformly from [-``bound``, ``bound``].

    If ``config.init_method`` only registers parameters, so that they are filled later (`Marked`),
    so does the returned initializer.
    """
    method = partial(torch.nn.init.uniform_, a=-bound, b=bound)
    usual = config.init_method
    return Marked(method, usual.marks) if isinstance(usual, Marked) else method


def mark_replicated(module: torch.nn.Module, config: TransformerConfig) -> None:
    """Mark replicated parameters, so that megatron-core sums their gradients over TP ranks.

    It has an effect only under sequence parallelism, where each rank processes some of the tokens.
    """
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ColumnPiece(ColumnParallelLinear):
    """A linear layer from ``[s, b, in]`` to a rank's ``[s, b, out / tp]``, without communication.

    It returns (output without bias, bias); the caller must add the bias. Weight and bias start as
    in torch.nn.Linear.
    """

    communicates = False

    def __init__(self, plan: Blueprint, inputs: int, outputs: int, *, bias: bool = True) -> None:
        method = uniform(plan.config, 1 / math.sqrt(inputs))
        super().__init__(
            inputs, outputs, config=plan.config, init_method=method, bias=bias, skip_bias_add=True,
            disable_grad_reduce=True, tp_group=plan.groups.tp,
        )  # fmt: skip
        self.sequence_parallel = False
        if self.bias is not None and plan.config.perform_initialization:
            method(self.bias)


class RowPiece(RowParallelLinear):
    """A linear layer from this rank's ``[s, b, in / tp]`` to a partial sum ``[s, b, out]``.

    The caller sums over the ranks, then adds the bias. If several layers add to one sum, only one
    of them has a bias, and ``fan_in`` is the total number of their inputs. Weight and bias start as
    in a torch.nn.Linear with ``fan_in`` inputs.
    """

    communicates = False

    def __init__(
        self,
        plan: Blueprint,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        fan_in: int | None = None,
    ) -> None:
        method = uniform(plan.config, 1 / math.sqrt(fan_in or inputs))
        super().__init__(
            inputs, outputs, config=plan.config, init_method=method, bias=bias,
            input_is_parallel=True, skip_bias_add=True, tp_group=plan.groups.tp,
        )  # fmt: skip
        self.sequence_parallel = False
        if self.bias is not None and plan.config.perform_initialization:
            method(self.bias)

    def forward(self, input_: Tensor) -> tuple[Tensor, Any]:
        """Return (this rank's partial sum ``[s, b, out]``, bias), given ``[s, b, in / tp]``."""
        output = self.without_adapter(input_)
        return (output if self.lora is None else self.lora(self, input_, output)), self.bias

    def without_adapter(self, x: Tensor) -> Tensor:
        """Return this rank's partial sum without an adapter's."""
        return self._forward_impl(
            input=x, weight=self.weight, bias=None,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=False, sequence_parallel=False, tp_group=None, grad_output_buffer=None,
        )  # fmt: skip


def column(
    plan: Blueprint,
    inputs: int,
    outputs: int,
    *,
    projections: int = 1,
    whole_input: bool = False,
) -> ColumnParallelLinear:
    """Build a linear layer from ``[s, b, inputs]`` to ``[s, b, projections * outputs / tp]``.

    The layer computes ``projections`` projections at once, such as queries, keys and values. It
    returns (output without bias, bias); the caller must add the bias. Weights start uniform in
    +-``sqrt(6 / (inputs + outputs))`` (Glorot & Bengio 2010). Under sequence parallelism the layer
    gathers its input from the ranks, unless ``whole_input`` says that each rank has all tokens.
    """
    config = plan.config
    tp = plan.groups.tp
    method = uniform(config, math.sqrt(6 / (inputs + outputs)))
    layer = ColumnParallelLinear(
        inputs, projections * outputs, config=config, init_method=method, skip_bias_add=True,
        tp_group=tp,
    )  # fmt: skip
    if projections > 1:
        layer.fused_parts = (plan.sizes.head_dim,) * projections
    if whole_input:
        layer.sequence_parallel = False
        layer.allreduce_dgrad = tp.size() > 1
    return layer


def row(plan: Blueprint, inputs: int, outputs: int) -> RowParallelLinear:
    """Build a linear layer from ``[s, b, inputs / tp]`` to ``[s, b, outputs]``.

    The layer returns (output without bias, bias); the caller must add the bias. Weights start as in
    `column`. Under sequence parallelism the output has only this rank's s / tp tokens.
    """
    method = uniform(plan.config, math.sqrt(6 / (inputs + outputs)))
    return RowParallelLinear(
        inputs, outputs, config=plan.config, init_method=method, bias=True, input_is_parallel=True,
        skip_bias_add=True, tp_group=plan.groups.tp,
    )  # fmt: skip


def heads_of(x: Tensor, num_projections: int, head_dim: int) -> tuple[Tensor, ...]:
    """Split a fused projection ``[s, b, n * p * d]`` into p = ``num_projections`` tensors.

    Each is ``[s, b, n, d]``.

    The p projections of a head are adjacent, so that tensor parallelism can split the weight's rows
    contiguously between heads.
    """
    if num_projections == 1:
        # Its gradient would be copied for the sake of an axis of one.
        return (torch.unflatten(x, -1, (-1, head_dim)),)
    return torch.unflatten(x, -1, (-1, num_projections, head_dim)).unbind(-2)


class VectorEmbedder(torch.nn.Module):
    """Two linear layers with SiLU between them, from ``[b, width]`` to ``[b, h]``."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.linear_in = torch.nn.Linear(width, hidden_size)
        self.linear_out = torch.nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[b, h]`` for ``[b, width]``, in the dtype of the weights."""
        x = x.to(self.linear_in.weight.dtype)
        return self.linear_out(F.silu(self.linear_in(x)))  # type: ignore[no-any-return]


class Modulation(ReplicatedLinear):
    """A layer ``Linear(SiLU(vec))`` that computes shifts, scales and gates from a vector.

    The output has ``num_parts`` parts of h features each, in the order shift, scale, gate, shift
    and so on. With ``zero`` the layer starts at zero (adaLN-Zero, DiT, arXiv:2212.09748).
    """

    def __init__(self, config: TransformerConfig, num_parts: int, *, zero: bool) -> None:
        super().__init__(config.hidden_size, num_parts * config.hidden_size)
        self.num_parts = num_parts
        if zero:
            start_at_zero(self)
        mark_replicated(self, config)

    def parts(self, vec: Tensor) -> tuple[Tensor, ...]:
        """Return ``num_parts`` tensors ``[b, h]``, shift, scale, gate, ..., for vec ``[b, h]``."""
        return self(F.silu(vec)).chunk(self.num_parts, dim=-1)  # type: ignore[no-any-return]


def start_at_zero(linear: torch.nn.Linear) -> None:
    """Set weight and bias of a layer to zero, so that training starts from zero.

    `initialize_by_name`, which initializes the model's parameters later, leaves these at zero.
    """
    torch.nn.init.zeros_(linear.weight)
    if linear.bias is not None:
        torch.nn.init.zeros_(linear.bias)


def mark_new_branch(module: torch.nn.Module) -> None:
    """Mark a module as new, so that ``--finetune`` accepts checkpoints without its parameters."""
    for parameter in module.parameters():
        parameter.new_branch = True  # type: ignore[attr-defined]


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return ``(1 + scale) * LN(x) + shift`` for x ``[s, b, h]``.

    LN is LayerNorm without parameters.
    """
    return (1 + scale) * F.layer_norm(x, x.shape[-1:], eps=EPSILON) + shift


modulated_alone = compiled(modulated)
