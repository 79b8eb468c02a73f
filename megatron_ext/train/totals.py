"""Numbers of a step that are summed over ranks: targets, losses, norm of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
)
from torch import Tensor

from megatron_ext.data.batch import Batch
from megatron_ext.layers.specs import expert_pattern
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.losses.contract import Report, StepCounts
from megatron_ext.parallel.context import ParallelContext


def count_targets(batches: Sequence[Batch], context: ParallelContext) -> StepCounts:
    """Count the targets of a step over all micro-batches, data- and context-parallel ranks."""
    sums = torch.stack(
        [
            torch.stack(
                [
                    torch.count_nonzero(batch.loss_weights).float(),
                    *(mask.sum() for mask in (batch.loss_weights, *batch.mtp_loss_weights)),
                ]
            )
            for batch in batches
        ]
    ).sum(dim=0)
    torch.distributed.all_reduce(sums, group=context.pgs.dp_cp)
    return StepCounts(main=sums[0], weight=sums[1], mtp=sums[2:], num_microbatches=len(batches))


def reduce_reports(reports: Sequence[Report], context: ParallelContext) -> dict[str, Tensor]:
    """Sum ``[sum, count]`` entries over micro-batches, data- and context-parallel ranks."""
    if not reports:
        return {}
    keys = list(reports[0])
    # In double precision: a count beyond 2^24 tokens is not exact in single.
    entries = [torch.stack([report[key].view(2).double() for report in reports]) for key in keys]
    totals = torch.stack([entry.sum(dim=0) for entry in entries])
    torch.distributed.all_reduce(totals, group=context.pgs.dp_cp)
    return dict(zip(keys, totals.unbind(0), strict=True))


def mean_of(entry: Tensor) -> Tensor:
    """Divide the sum by the count of ``[sum, count]``; a count of 0 gives 0."""
    return torch.where(entry[1] > 0, entry[0] / entry[1].clamp(min=1e-30), 0.0)


NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Maps ``--moe-router-load-balancing-type`` to the name that Megatron-LM logs."""


def logged_names(transformer_config: StepTransformerConfig) -> list[str]:
    """Return the names of the losses that the routers of this configuration keep."""
    kinds = transformer_config.moe_router_load_balancing_type
    given = [kinds] if isinstance(kinds, str) else kinds
    names = [NAMES[kind] for kind in given if kind in NAMES]
    return [*names, "z_loss"] if transformer_config.moe_z_loss_coeff is not None else names


def take_auxiliary_losses(
    transformer_config: StepTransformerConfig, context: ParallelContext, num_microbatches: int
) -> dict[str, torch.Tensor]:
    """Return the mean of each auxiliary loss over layers and micro-batches.

    All ranks call this together. megatron-core's own reduction needs experts on every pipeline
    stage, and a collective that Gloo does not have. A load-balancing loss is kept in parts on the
    tensor- and context-parallel ranks, the global one also on the replicas; the parts add up. A
    z-loss is whole on each rank.
    """
    tracker = get_moe_layer_wise_logging_tracker()
    names = logged_names(transformer_config)
    device = torch.device("cuda", torch.cuda.current_device())
    totals = torch.zeros(len(names), dtype=torch.float64, device=device)
    for index, name in enumerate(names):
        if name in tracker:
            totals[index] = tracker[name]["values"].double().sum()
    clear_aux_losses_tracker()
    pattern = expert_pattern(transformer_config)
    layers = sum(pattern) + (transformer_config.mtp_num_layers or 0) * pattern[-1]
    # Replicas and whole copies are averaged by hand: Gloo has no average.
    torch.distributed.all_reduce(totals)
    replicas = context.layout.data_parallel_size
    copies = {"z_loss": replicas * context.pgs.tp_cp.size(), NAMES["global_aux_loss"]: 1}
    return {
        name: total / (copies.get(name, replicas) * max(1, layers) * num_microbatches)
        for name, total in zip(names, totals.unbind(0), strict=True)
    }


@torch.no_grad()
def params_norm(chunks: Sequence[DistributedDataParallel], context: ParallelContext) -> float:
    """Return the global L2 norm of the parameters; all ranks call this together."""
    return float(_summed(lambda p: p.double().square().sum(), chunks, context).sqrt())


def count_parameters(
    chunks: Sequence[DistributedDataParallel], context: ParallelContext
) -> tuple[int, int, int]:
    """Count the parameters of the model, those that are trained, and the most on one rank.

    All ranks call this together.
    """

    def measured(parameter: torch.nn.Parameter) -> Tensor:
        sizes = [parameter.numel(), parameter.numel() * parameter.requires_grad]
        return torch.tensor(sizes, dtype=torch.float64, device=parameter.device)

    model, trained = _summed(measured, chunks, context).tolist()
    here = [p for chunk in chunks for p in chunk.parameters()]
    largest = torch.tensor(sum(p.numel() for p in here), device=here[0].device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return int(model), int(trained), int(largest)


def _summed(
    measured: Callable[[torch.nn.Parameter], Tensor],
    chunks: Sequence[DistributedDataParallel],
    context: ParallelContext,
) -> Tensor:
    """Sum a measure in double precision over all parameters, each once, whatever the layout."""
    zero = torch.zeros_like(measured(next(chunks[0].parameters())))
    dense, experts = zero, zero
    for chunk in chunks:
        for parameter in chunk.parameters():
            if not param_is_not_tensor_parallel_duplicate(parameter):
                continue
            if not getattr(parameter, "allreduce", True):
                experts = experts + measured(parameter)
            elif param_is_not_shared(parameter):
                dense = dense + measured(parameter)
    dense, experts = dense.clone(), experts.clone()
    torch.distributed.all_reduce(dense, group=context.pgs.mp)
    torch.distributed.all_reduce(experts, group=context.pgs.tp_ep_pp)
    return dense + experts
