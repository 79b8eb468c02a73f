"""Linear layers that leave the communication to the block around them.

A block has two streams, or two branches, on one joint sequence. With a gather and a reduction in
each of its layers, as in megatron-core's, it would communicate two to four times as often, and
under sequence parallelism each stream's tokens would have to divide by the ranks. Here the block
enters the tensor-parallel region once for both (`enter`) and leaves it once (`leave`); its layers
only multiply. The price: under sequence parallelism the gathered input of a half block is kept for
the backward pass where core gathers it again; recomputed blocks do not keep it.

megatron-core's parallel linear layers as the blocks use them.

Each communicates for itself, unlike those of `mmdit.linear`, since each half of a block enters the
tensor-parallel region once anyway; so they take adapters (`layers.lora`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError
from megatron_ext.layers.initialization import Initialize, Marked
from megatron_ext.layers.linear import ColumnParallelLinear, RowParallelLinear


def enter(x: Tensor, config: TransformerConfig, tp_group: ProcessGroup) -> Tensor:
    """Give all tokens to every tensor-parallel rank.

    Args:
        x: ``[s/tp, b, h]`` with sequence parallelism, else ``[s, b, h]``.

    Returns:
        ``[s, b, h]``, whose gradient is summed over the ranks.
    """
    if config.sequence_parallel:
        gathered: Tensor = gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=True, group=tp_group
        )
        return gathered
    copied: Tensor = copy_to_tensor_model_parallel_region(x, group=tp_group)
    return copied


def leave(partial_sums: Tensor, config: TransformerConfig, tp_group: ProcessGroup) -> Tensor:
    """Sum what the tensor-parallel ranks computed; the inverse of `enter` in shapes."""
    if config.sequence_parallel:
        scattered: Tensor = reduce_scatter_to_sequence_parallel_region(partial_sums, group=tp_group)
        return scattered
    total: Tensor = reduce_from_tensor_model_parallel_region(partial_sums, group=tp_group)
    return total


def library_default(config: TransformerConfig, fan_in: int) -> Initialize:
    """How torch.nn.Linear fills weight and bias: uniform within 1 / sqrt(fan_in).

    Marks the parameter, to be filled by name, where the configuration's methods do so.
    """
    bound = 1 / math.sqrt(fan_in)
    method = partial(torch.nn.init.uniform_, a=-bound, b=bound)
    if isinstance(config.init_method, Marked):
        return Marked(method, config.init_method.marks)
    return method


def mark_replicated(module: torch.nn.Module, config: TransformerConfig) -> None:
    """Mark parameters that every tensor-parallel rank holds.

    Under sequence parallelism each rank sees some of the tokens, and core sums the gradients.
    """
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _refuse_adapter(layer: Any) -> None:
    if layer.lora is not None:
        raise ConfigError(
            "`--lora-rank` cannot be used with an MMDiT, whose layers communicate in common; "
            "train all of its weights."
        )


class ColumnPiece(ColumnParallelLinear):
    """``[s, b, in]`` to this rank's ``[s, b, out / tp]``, without communication.

    The bias is left to the function that comes next.

    Args:
        inputs: width of the input.
        outputs: width of the output over all ranks.
        config: of the run.
        tp_group: ranks that share the outputs.
        bias: add a bias.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        config: TransformerConfig,
        tp_group: ProcessGroup,
        *,
        bias: bool = True,
    ) -> None:
        method = library_default(config, inputs)
        super().__init__(
            inputs,
            outputs,
            config=config,
            init_method=method,
            bias=bias,
            skip_bias_add=True,
            disable_grad_reduce=True,
            tp_group=tp_group,
        )
        self.sequence_parallel = False
        if self.bias is not None and config.perform_initialization:
            method(self.bias)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[s, b, in]`` to ``[s, b, out / tp]``, and the bias."""
        _refuse_adapter(self)
        return super().forward(input_)


class RowPiece(RowParallelLinear):
    """This rank's ``[s, b, in / tp]`` to its part of a sum ``[s, b, out]``.

    The bias, None for all but one of the pieces of a sum, is to be added after `leave`.

    Args:
        inputs: width of the input over all ranks.
        outputs: width of the output.
        config: of the run.
        tp_group: ranks that share the inputs.
        bias: hold a bias.
        fan_in: inputs of the whole sum, if this is a piece of it.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        config: TransformerConfig,
        tp_group: ProcessGroup,
        *,
        bias: bool = True,
        fan_in: int | None = None,
    ) -> None:
        method = library_default(config, fan_in or inputs)
        super().__init__(
            inputs,
            outputs,
            config=config,
            init_method=method,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=tp_group,
        )
        if self.bias is not None and config.perform_initialization:
            method(self.bias)

    def forward(self, input_: Tensor) -> tuple[Tensor, Any]:
        """``[s, b, in / tp]`` to the part of the sum, and the bias."""
        _refuse_adapter(self)
        output = self._forward_impl(
            input=input_,
            weight=self.weight,
            bias=None,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=None,
            grad_output_buffer=None,
        )
        return output, self.bias


def xavier(config: TransformerConfig, inputs: int, outputs: int) -> Initialize:
    """Uniform within ``sqrt(6 / (inputs + outputs))`` (Glorot & Bengio 2010), biases zero.

    Given the widths of one projection, for a weight that holds several. Marks the parameter, to be
    filled by name, where the configuration's methods do so.
    """
    bound = math.sqrt(6 / (inputs + outputs))
    method = partial(torch.nn.init.uniform_, a=-bound, b=bound)
    if isinstance(config.init_method, Marked):
        return Marked(method, config.init_method.marks)
    return method


def column(
    config: TransformerConfig,
    tp_group: ProcessGroup,
    inputs: int,
    outputs: int,
    *,
    projections: int = 1,
) -> ColumnParallelLinear:
    """``[s, b, inputs]`` to this rank's ``[s, b, projections * outputs / tp]``, and the bias.

    The biases of all of these layers are left to the function that comes next.
    """
    return ColumnParallelLinear(
        inputs,
        projections * outputs,
        config=config,
        init_method=xavier(config, inputs, outputs),
        bias=True,
        skip_bias_add=True,
        gather_output=False,
        tp_group=tp_group,
    )


def column_of_whole(
    config: TransformerConfig,
    tp_group: ProcessGroup,
    inputs: int,
    outputs: int,
    *,
    projections: int = 1,
) -> ColumnParallelLinear:
    """As `column`, of an input that every rank holds whole, also under sequence parallelism."""
    layer = column(config, tp_group, inputs, outputs, projections=projections)
    layer.sequence_parallel = False
    layer.allreduce_dgrad = tp_group.size() > 1
    return layer


def row(
    config: TransformerConfig, tp_group: ProcessGroup, inputs: int, outputs: int
) -> RowParallelLinear:
    """This rank's ``[s, b, inputs / tp]`` to ``[s, b, outputs]``, and the bias."""
    return RowParallelLinear(
        inputs,
        outputs,
        config=config,
        init_method=xavier(config, inputs, outputs),
        bias=True,
        input_is_parallel=True,
        skip_bias_add=True,
        tp_group=tp_group,
    )


def heads_of(x: Tensor, num_projections: int, head_dim: int) -> tuple[Tensor, ...]:
    """Take a fused projection apart.

    Args:
        x: ``[s, b, n * p * d]``; the p projections of a head follow one another, so that a
            contiguous part of the weight's rows is whole heads.
        num_projections: p.
        head_dim: d.

    Returns:
        p tensors ``[s, b, n, d]``.
    """
    if num_projections == 1:
        # Its gradient would be copied for the sake of an axis of one.
        return (torch.unflatten(x, -1, (-1, head_dim)),)
    return torch.unflatten(x, -1, (-1, num_projections, head_dim)).unbind(-2)
