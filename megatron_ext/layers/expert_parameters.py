"""The parameters of experts, and the ranks over which their gradients are summed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer


def expert_parameters(chunk: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of a chunk's experts, without routers and shared experts."""
    for module in chunk.modules():
        if isinstance(module, BaseMoELayer) and module.experts is not None:
            yield from module.experts.parameters()


def mark_experts(chunk: torch.nn.Module, groups: ProcessGroupCollection) -> None:
    """Mark experts' parameters so that each gradient is summed over exactly the ranks with copies.

    This corrects two faults of megatron-core. If ``--expert-model-parallel-size`` is 1, it reduces
    experts like dense layers; but if the expert-tensor-parallel size differs from the
    tensor-parallel size, other ranks hold the copies of an expert. And under sequence parallelism
    it sums the gradients of the bias of an expert's second layer over the tensor-parallel ranks,
    which hold other experts, or copies whose gradients are already summed.
    """
    for parameter in expert_parameters(chunk):
        size = groups.expt_tp.size()
        if size != groups.tp.size():
            parameter.allreduce = False  # type: ignore[attr-defined]
        if size == 1 and not getattr(parameter, "allreduce", True):
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            if not getattr(parameter, "tensor_model_parallel", False):
                # So that every tensor-parallel rank counts it in the gradient norm.
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                parameter.partition_dim, parameter.partition_stride = 0, 1  # type: ignore[attr-defined]
