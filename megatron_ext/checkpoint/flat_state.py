"""Optimizer state and averaged weights (EMA) as they lie in memory, saved without communication.

Each rank describes the elements that it updates itself (fp32 weight, moments and average) as a part
of a flattened weight. Tensors are not copied, which keeps a snapshot cheap. The parts load in a
layout with another number of replicas, but only with the same tensor, pipeline and expert parallel
sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_map_only

from megatron_ext.optim.ema import ShardedEMA
from megatron_ext.optim.shards import Shard, shards_of
from megatron_ext.optim.update import parts_of
from megatron_ext.parallel.context import ParallelContext

FLAT = "flat"
"""The value of megatron-core's ``distrib_optim_sharding_type`` for the format of this module."""
PLACE = "place"
"""Key of a rank's `Place` in the ``metadata`` that sharding functions take."""
RECORDS = "records"
"""Key in an optimizer's state of all that is not a tensor, such as settings and step counts."""


@dataclass(frozen=True)
class Place:
    """A rank's coordinates in the model-parallel layout, and which replica of its weights it holds.

    Attributes:
        dense: text that identifies the shard of dense weights, such as "pp0.tp1".
        expert: text that identifies the shard of experts' weights, such as "pp0.ep0.tp1".
        dense_replica: index of this rank among the ranks that hold the same dense weights.
        expert_replica: index of this rank among the ranks that hold the same experts.
    """

    dense: str
    expert: str
    dense_replica: int
    expert_replica: int

    @classmethod
    def of(cls, context: ParallelContext) -> Place:
        """Return the coordinates and replica indices of this rank."""
        groups = context.pgs
        pp = context.pp_rank
        return cls(
            f"pp{pp}.tp{context.tp_rank}",
            f"pp{pp}.ep{groups.ep.rank()}.tp{groups.expt_tp.rank()}",
            groups.dp_cp.rank(),
            groups.expt_dp.rank(),
        )

    def sharded(self, name: str, tensor: Tensor, shard: Shard) -> ShardedTensor:
        """Return a sharded tensor that stores ``tensor`` as a part of a flattened weight.

        Args:
            name: name of the state in the checkpoint, without this rank's coordinates.
            tensor: one value for each element of ``shard``.
            shard: the part of the weight that this rank updates.
        """
        is_expert = not getattr(shard.parameter, "allreduce", True)
        where = self.dense
        replica = self.dense_replica
        if is_expert:
            where = self.expert
            replica = self.expert_replica
        flat = tensor.detach().view(-1)
        return ShardedTensor(
            f"{name}/{where}",
            flat,
            flat.dtype,
            tuple(flat.shape),
            (shard.parameter.numel(),),
            (shard.start,),
            axis_fragmentations=None,
            # With a distributed optimizer, the shards of all ranks form a single copy of the
            # weight.
            replica_id=replica if shard.group is None else 0,
        )


def names_of(model: list[Any]) -> dict[Parameter, str]:
    """Return the name of each parameter, prefixed by the number of its chunk."""
    chunks: list[Module] = unwrap_model(model)
    return {
        parameter: f"{number}.{name}"
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def _shards(
    optimizer: MegatronOptimizer, model: list[Any]
) -> Iterator[tuple[str, Shard, dict[str, Tensor]]]:
    """Yield the parts of parameters that this rank updates, except empty ones.

    Each is (name of the parameter, shard, tensors of the shard by kind: fp32 weight and moments).
    """
    names = names_of(model)
    for part in parts_of(optimizer):
        for shard in shards_of(part):
            if shard.main.numel():
                state = part.optimizer.state.get(shard.main, {})
                kept = {k: v for k, v in state.items() if torch.is_tensor(v) and k != "step"}
                yield names[shard.parameter], shard, {"param": shard.main, **kept}


def _inner(part: Any) -> Any:
    return getattr(part, "optimizer", None)


def optimizer_state(optimizer: MegatronOptimizer, model: list[Any], place: Place) -> dict[str, Any]:
    """Return the state of an optimizer, or of a chain of them, as live tensors without copies.

    Keys are weight names, and under them kinds of tensor, such as "exp_avg". Values that are not
    tensors lie under `RECORDS`. ``place`` says which shard and which replica this rank holds.
    """
    records = []
    for part in parts_of(optimizer):
        groups = getattr(_inner(part), "param_groups", [])
        steps = [_steps(part, group) for group in groups]
        scaler = getattr(part, "grad_scaler", None)
        records.append(
            {
                "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
                "steps": [*steps, next((step for step in steps if step is not None), None)],
                "scaler": None if scaler is None else scaler.state_dict(),
            }
        )
    state: dict[str, Any] = {
        name: {kind: place.sharded(f"optimizer.{kind}.{name}", x, shard) for kind, x in own.items()}
        for name, shard, own in _shards(optimizer, model)
    }
    key = f"optimizer.{RECORDS}.{place.dense}"
    state[RECORDS] = ShardedObject(key, records, (1,), (0,), replica_id=place.dense_replica)
    return state


def _steps(part: Any, group: dict[str, Any]) -> float | None:
    """Return how many updates torch has counted for a parameter group.

    The result is None if this rank has no optimizer state of the group. ``part`` is the optimizer
    that the group belongs to.
    """
    states = (_inner(part).state.get(parameter, {}) for parameter in group["params"])
    return next((float(state["step"]) for state in states if "step" in state), None)


def is_flat(state: dict[Any, Any]) -> bool:
    """Return whether an optimizer's state has the format of `optimizer_state` in this module."""
    return RECORDS in state


@torch.no_grad()
def load_optimizer(optimizer: MegatronOptimizer, model: list[Any], state: dict[str, Any]) -> None:
    """Copy the values of ``state``, made by `optimizer_state`, into the state of an optimizer.

    The optimizer's own state tensors must already exist; they are overwritten in place.
    """
    for name, _, own in _shards(optimizer, model):
        for kind, tensor in own.items():
            tensor.copy_(state[name][kind].view(tensor.shape))
    # Copied in place: the optimizer must keep tensors of its own (such as the loss scale), because
    # the memory behind a snapshot's tensors changes later.
    records = tree_map_only(Tensor, Tensor.clone, state[RECORDS])
    for part, record in zip(parts_of(optimizer), records, strict=True):
        *counts, common_count = record["steps"]
        groups = getattr(_inner(part), "param_groups", [])
        for group, saved, count in zip(groups, record["groups"], counts, strict=True):
            group.update(saved)
            count = common_count if count is None else count
            for parameter in group["params"] if count is not None else ():
                _inner(part).state[parameter]["step"].fill_(count)
        if record["scaler"] is not None:
            part.grad_scaler.load_state_dict(record["scaler"])


def averages(ema: ShardedEMA, model: list[Any], place: Place, prefix: str) -> dict[str, Any]:
    """Return this rank's shards of the averaged weights (EMA), by weight name.

    ``place`` says which shard and replica this rank holds. In the checkpoint, each shard's name
    starts with ``prefix`` and contains the weight's name.
    """
    names = names_of(model)
    return {
        names[part.parameter]: place.sharded(
            f"{prefix}{FLAT}.{names[part.parameter]}", part.average, part
        )
        for part in ema.parts
        if part.average.numel()
    }


@torch.no_grad()
def load_averages(ema: ShardedEMA, model: list[Any], state: dict[str, Tensor]) -> None:
    """Copy the values of a state made by `averages` into this rank's parts of the averages."""
    names = names_of(model)
    for part in ema.parts:
        if part.average.numel():
            part.average.copy_(state[names[part.parameter]].view(part.average.shape))
