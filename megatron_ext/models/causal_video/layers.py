"""megatron-core's parallel linear layers as the blocks use them.

Each communicates for itself, unlike those of `mmdit.linear`, since each half of a block enters the
tensor-parallel region once anyway; so they take adapters (`models.lora`).
"""

from __future__ import annotations

import math
from functools import partial

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.models.initialization import Initialize, Marked
from megatron_ext.models.linear import ColumnParallelLinear, RowParallelLinear


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
