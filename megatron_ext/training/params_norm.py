"""Global L2 norm of the parameters (--log-params-norm)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

if TYPE_CHECKING:
    from megatron_ext.layout import ParallelContext


@torch.no_grad()
def params_norm(chunks: list[DistributedDataParallel], context: ParallelContext) -> float:
    """Each parameter counted once, whatever the layout; all ranks call this together."""
    device = next(chunks[0].parameters()).device
    dense = torch.zeros((), dtype=torch.float64, device=device)
    experts = torch.zeros_like(dense)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if not param_is_not_tensor_parallel_duplicate(parameter):
                continue
            square = parameter.double().square().sum()
            if not getattr(parameter, "allreduce", True):
                experts += square
            elif param_is_not_shared(parameter):
                dense += square
    torch.distributed.all_reduce(dense, group=context.pgs.mp)
    torch.distributed.all_reduce(experts, group=context.pgs.tp_ep_pp)
    return float((dense + experts).sqrt())
