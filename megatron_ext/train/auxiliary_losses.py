"""The losses that layers add in training, as the log shows them: of MoE routers and indexers."""

from __future__ import annotations

import torch

from megatron_ext import core
from megatron_ext.config.layers import has_experts
from megatron_ext.layers.auxiliary_loss import INDEXER_LOSS, INDEXER_LOSS_COUNT
from megatron_ext.layers.specs import depth_kind, layer_kinds
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.parallel.context import ParallelContext

NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Megatron-LM's names in the log for the losses of ``--moe-router-load-balancing-type``."""


def take_auxiliary_losses(
    transformer_config: StepTransformerConfig, context: ParallelContext, num_microbatches: int
) -> dict[str, torch.Tensor]:
    """Return each auxiliary loss by its name in the log, averaged over layers and micro-batches.

    All ranks call this together. It replaces megatron-core's reduction, which fails if a pipeline
    stage has no experts, and with Gloo. The values of the ranks are combined as follows:

    - load-balancing loss: summed over tensor- and context-parallel ranks, which each hold a part,
      and averaged over data-parallel replicas;
    - global load-balancing loss: summed over all these ranks;
    - z-loss: averaged over all these ranks, since each holds the whole loss;
    - loss of the indexer of sparse attention: divided by the count of losses that is logged with
      it.
    """
    logged = core.take_auxiliary_losses()
    names = _router_losses(transformer_config)
    has_indexer = bool(transformer_config.dsa_indexer_loss_coeff)
    if has_indexer:
        names += [INDEXER_LOSS, INDEXER_LOSS_COUNT]
    device = torch.device("cuda", torch.cuda.current_device())
    totals = torch.zeros(len(names), dtype=torch.float64, device=device)
    for index, name in enumerate(names):
        if name in logged:
            totals[index] = logged[name].double().sum()
    kinds = layer_kinds(transformer_config)
    kinds += [depth_kind(transformer_config)] * (transformer_config.mtp_num_layers or 0)
    layers = sum(has_experts(kind) for kind in kinds)
    # Average replicas and whole copies by a sum and a division: Gloo has no average.
    torch.distributed.all_reduce(totals)
    replicas = context.layout.data_parallel_size
    copies = {"z_loss": replicas * context.pgs.tp_cp.size(), NAMES["global_aux_loss"]: 1}
    found = dict(zip(names, totals.unbind(0), strict=True))
    means = {}
    if has_indexer:
        count = found.pop(INDEXER_LOSS_COUNT)
        means[INDEXER_LOSS] = found.pop(INDEXER_LOSS) / torch.where(count > 0, count, 1.0)
    for name, total in found.items():
        means[name] = total / (copies.get(name, replicas) * max(1, layers) * num_microbatches)
    return means


def _router_losses(transformer_config: StepTransformerConfig) -> list[str]:
    """Return the names in the log of the losses of MoE routers; [] without experts."""
    if transformer_config.num_moe_experts is None:
        return []
    kinds = transformer_config.moe_router_load_balancing_type
    given = [kinds] if isinstance(kinds, str) else kinds
    names = [NAMES[kind] for kind in given if kind in NAMES]
    return names + (["z_loss"] if transformer_config.moe_z_loss_coeff is not None else [])
