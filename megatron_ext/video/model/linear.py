"""Linear layers of the video networks, and where a block enters and leaves the parallel region.

A block of an MMDiT has two streams, or two branches, on one joint sequence. With a gather and a
reduction in each of its layers, as in megatron-core's, it would communicate two to four times as
often, and under sequence parallelism each stream's tokens would have to divide by the ranks. Such a
block enters the tensor-parallel region once for both (`enter`) and leaves it once (`leave`); its
layers, `ColumnPiece` and `RowPiece`, only multiply. The price: under sequence parallelism the
gathered input of a half block is kept for the backward pass, where megatron-core gathers it again;
recomputed blocks do not keep it.

Each half of a block of Wan enters the region once anyway, so that its layers (`column`, `row`)
communicate for themselves and take adapters (`layers.lora`).
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
    """Sum the partial results of the tensor-parallel ranks, and invert the shapes of `enter`."""
    if config.sequence_parallel:
        scattered: Tensor = reduce_scatter_to_sequence_parallel_region(partial_sums, group=tp_group)
        return scattered
    total: Tensor = reduce_from_tensor_model_parallel_region(partial_sums, group=tp_group)
    return total


def uniform(config: TransformerConfig, bound: float) -> Initialize:
    """Return what fills a parameter uniformly within ``bound``.

    It marks the parameter, to be filled by name, where the configuration's methods do so.
    """
    method = partial(torch.nn.init.uniform_, a=-bound, b=bound)
    if isinstance(config.init_method, Marked):
        return Marked(method, config.init_method.marks)
    return method


def library_default(config: TransformerConfig, fan_in: int) -> Initialize:
    """Return what fills weight and bias as torch.nn.Linear does: within ``1 / sqrt(fan_in)``."""
    return uniform(config, 1 / math.sqrt(fan_in))


def mark_replicated(module: torch.nn.Module, config: TransformerConfig) -> None:
    """Mark the parameters of a module as held by every tensor-parallel rank.

    Under sequence parallelism each rank sees some of the tokens, and megatron-core sums the
    gradients.
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
    """A layer from ``[s, b, in]`` to this rank's ``[s, b, out / tp]``, without communication.

    The bias is left to the function that comes next.

    Args:
        inputs: width of the input.
        outputs: width of the output over all ranks.
        tp_group: ranks that share the outputs.
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
        """Return ``[s, b, out / tp]`` for ``[s, b, in]``, and the bias."""
        _refuse_adapter(self)
        return super().forward(input_)


class RowPiece(RowParallelLinear):
    """A layer from this rank's ``[s, b, in / tp]`` to its part of a sum ``[s, b, out]``.

    The bias, None for all but one of the pieces of a sum, is to be added after `leave`.

    Args:
        inputs: width of the input over all ranks.
        outputs: width of the output.
        tp_group: ranks that share the inputs.
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
        """Return this rank's part of the sum for ``[s, b, in / tp]``, and the bias."""
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
    """Return what fills a weight within ``sqrt(6 / (inputs + outputs))`` (Glorot & Bengio 2010).

    The widths are those of one projection, also for a weight that holds several.
    """
    return uniform(config, math.sqrt(6 / (inputs + outputs)))


def column(
    config: TransformerConfig,
    tp_group: ProcessGroup,
    inputs: int,
    outputs: int,
    *,
    projections: int = 1,
) -> ColumnParallelLinear:
    """Build a layer from ``[s, b, inputs]`` to this rank's ``[s, b, projections * outputs / tp]``.

    It returns its bias beside its output, as `row` does, for the function that comes next to add.
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
    """Build a `column` for an input that every rank holds whole, with sequence parallelism too."""
    layer = column(config, tp_group, inputs, outputs, projections=projections)
    layer.sequence_parallel = False
    layer.allreduce_dgrad = tp_group.size() > 1
    return layer


def row(
    config: TransformerConfig, tp_group: ProcessGroup, inputs: int, outputs: int
) -> RowParallelLinear:
    """Build a layer from this rank's ``[s, b, inputs / tp]`` to ``[s, b, outputs]`` and a bias."""
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
