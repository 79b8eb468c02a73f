"""The losses of a step over all ranks: sums of reports, their means, and routers' losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_ext import core
from megatron_ext.layers.specs import expert_pattern
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.losses.contract import Report
from megatron_ext.parallel.context import ParallelContext


def reduce_reports(reports: Sequence[Report], context: ParallelContext) -> dict[str, Tensor]:
    """Sum each loss's ``[sum, count]`` over micro-batches, data- and context-parallel ranks."""
    if not reports:
        return {}
    keys = list(reports[0])
    # In double precision: a count beyond 2^24 tokens is not exact in single.
    entries = [torch.stack([report[key].view(2).double() for report in reports]) for key in keys]
    totals = torch.stack([entry.sum(dim=0) for entry in entries])
    with context.recorder.phase("reduce"):
        torch.distributed.all_reduce(totals, group=context.pgs.dp_cp)
    return dict(zip(keys, totals.unbind(0), strict=True))


def mean_of(entry: Tensor) -> Tensor:
    """Divide the sum by the count of ``[sum, count]``; a count of 0 gives 0."""
    return torch.where(entry[1] > 0, entry[0] / entry[1].clamp(min=1e-30), 0.0)


def means_of(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean of each loss from its ``[sum, count]``.

    A loss without targets, for instance of a kind that no sample had, is left out. The first loss,
    which is the run's loss, is always kept; without targets it is 0.
    """
    first = next(iter(totals), None)
    # In double precision, as the sums of single steps may not be.
    return {
        name: float(mean_of(total.double()))
        for name, total in totals.items()
        if name == first or total[1] > 0
    }


NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Names under which Megatron-LM logs the losses of ``--moe-router-load-balancing-type``."""


def take_auxiliary_losses(
    transformer_config: StepTransformerConfig, context: ParallelContext, num_microbatches: int
) -> dict[str, torch.Tensor]:
    """Return the mean of each MoE router loss over layers and micro-batches; all ranks call this.

    megatron-core's own reduction needs experts on every pipeline stage and a collective that Gloo
    lacks. A load-balancing loss is the sum of its parts on the tensor- and context-parallel ranks;
    the global one is summed over the replicas too. Each rank holds the whole z-loss.
    """
    logged = core.take_auxiliary_losses()
    kinds = transformer_config.moe_router_load_balancing_type
    given = [kinds] if isinstance(kinds, str) else kinds
    names = [NAMES[kind] for kind in given if kind in NAMES]
    names += ["z_loss"] if transformer_config.moe_z_loss_coeff is not None else []
    device = torch.device("cuda", torch.cuda.current_device())
    totals = torch.zeros(len(names), dtype=torch.float64, device=device)
    for index, name in enumerate(names):
        if name in logged:
            totals[index] = logged[name].double().sum()
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
