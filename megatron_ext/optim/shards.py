"""The elements of each parameter that a rank's optimizer updates: all, or a shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from megatron_ext.optim.update import parts_of


@dataclass(frozen=True)
class Shard:
    """The elements of one parameter that this rank updates.

    Attributes:
        main: the tensor that the optimizer updates on this rank: the whole parameter, or a
            (possibly empty) shard of the flattened parameter.
        start: index in the flattened parameter where the shard begins.
        group: ranks that hold the other shards; None if this rank holds the whole parameter.
    """

    parameter: Parameter
    main: Tensor
    start: int = 0
    group: ProcessGroup | None = None


def shards_of(optimizer: Any) -> Iterator[Shard]:
    """Yield this rank's `Shard` of each parameter, in an order that all ranks share.

    ``optimizer`` is a single optimizer of megatron-core, not a chain.
    """
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        models = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
        mains = [*optimizer.fp32_from_float16_groups, *optimizer.fp32_from_fp32_groups]
        for parameter, main in _pairs(models, mains):
            yield Shard(parameter, main)
    elif not isinstance(optimizer, DistributedOptimizer):
        for parameter in optimizer.get_parameters():
            yield Shard(parameter, parameter)
    else:
        models = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
        mains = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
        main_of = dict(_pairs(models, mains))
        # All ranks have all parameters in their buffers, in the same order.
        for parameter in (p for buffer in optimizer.buffers for p in buffer.param_index_map):
            main = torch.empty(0, dtype=torch.float32, device=parameter.device)
            start = 0
            if parameter in main_of:
                main = main_of[parameter]
                start = optimizer._get_model_param_range_map(parameter)["param"].start
            yield Shard(parameter, main, start, optimizer.data_parallel_group)


def take_sharded_gradients(optimizer: MegatronOptimizer) -> None:
    """Make distributed optimizers use ``main_grad`` itself as the gradient of this rank's shard.

    megatron-core would cut the shard out of a ``main_grad`` of the whole parameter. With sharded
    gradients (`layers.gradient_shards`), ``main_grad`` is already the shard.
    """

    def take(part: Any) -> None:
        for models, mains in (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            for model_group, main_group in zip(models, mains, strict=True):
                for model, main in zip(model_group, main_group, strict=True):
                    main.grad = model.main_grad

    for part in parts_of(optimizer):
        if isinstance(part, DistributedOptimizer):
            part._copy_model_grads_to_main_grads = partial(take, part)


def take_sharded_weights(optimizer: MegatronOptimizer) -> None:
    """Make distributed optimizers read and write this rank's shards instead of whole parameters.

    Call this before the first update, if weights are sharded (see `layers.weight_shards`).
    """

    def write(part: Any) -> None:
        for model, main in _pairs(part.shard_float16_groups, part.shard_fp32_from_float16_groups):
            model.copy_(main)

    def read(part: Any, **_unused: object) -> None:
        for model, main in _pairs(part.shard_float16_groups, part.shard_fp32_from_float16_groups):
            main.data.copy_(model)

    for part in parts_of(optimizer):
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:
            _point_to_shards(part)
            part._copy_main_params_to_model_params = partial(write, part)
            part._copy_model_params_to_main_params = partial(read, part)
            read(part)


def _point_to_shards(part: Any) -> None:
    """Let the weights that a distributed optimizer updates be this rank's shards of parameters."""
    for models, shards in (
        (part.model_float16_groups, part.shard_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    ):
        for model, shard in _pairs(models, shards):
            own = getattr(model, "weight_shard", None)
            if own is None:  # a single rank has all of it
                span = part._get_model_param_range_map(model)["param"]
                shard.data = model.data.view(-1)[span.start : span.end]
            else:
                shard.data = own.values


def _pairs(models: Any, mains: Any) -> Iterator[tuple[Parameter, Tensor]]:
    for model_group, main_group in zip(models, mains, strict=True):
        yield from zip(model_group, main_group, strict=True)
