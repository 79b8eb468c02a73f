"""Which elements of each parameter a rank's optimizer updates."""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch.nn import Parameter

from megatron_ext.optim.shards import shards_of

HALF = Parameter(torch.zeros(6, dtype=torch.bfloat16))
SINGLE = Parameter(torch.zeros(4))
OTHERS = Parameter(torch.zeros(3))
"""A weight without elements on this rank."""
MAIN = torch.ones(6)


class _Plain(Float16OptimizerWithFloat16Params):  # type: ignore[misc]
    def __init__(self) -> None:
        self.is_stub_optimizer = False
        self.float16_groups = [[HALF]]
        self.fp32_from_float16_groups = [[MAIN]]
        self.fp32_from_fp32_groups = [[SINGLE]]


def test_a_run_in_16_bits_may_have_weights_in_32_bits() -> None:
    found = [(shard.parameter, shard.main) for shard in shards_of(_Plain())]
    assert [(id(p), id(main)) for p, main in found] == [
        (id(HALF), id(MAIN)),
        (id(SINGLE), id(SINGLE)),
    ]


class _Distributed(DistributedOptimizer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.is_stub_optimizer = False
        self.data_parallel_group = "group"
        self.buffers = [
            SimpleNamespace(param_index_map={OTHERS: 0, HALF: 1}),
            SimpleNamespace(param_index_map={SINGLE: 0}),
        ]
        self.model_float16_groups = [[HALF]]
        self.shard_fp32_from_float16_groups = [[MAIN[:2]]]
        self.model_fp32_groups = [[SINGLE]]
        self.shard_fp32_groups = [[SINGLE.detach()[1:]]]

    def _get_model_param_range_map(self, parameter: Parameter) -> dict[str, Any]:
        return {"param": SimpleNamespace(start=4 if parameter is HALF else 1)}


def test_a_distributed_optimizer_has_a_shard_of_every_weight_in_the_buffers_order() -> None:
    shards = list(shards_of(_Distributed()))
    assert [id(shard.parameter) for shard in shards] == [id(OTHERS), id(HALF), id(SINGLE)]
    assert [(shard.start, shard.main.numel()) for shard in shards] == [(0, 0), (4, 2), (1, 3)]
    assert {shard.group for shard in shards} == {"group"}
    assert all(shard.main.dtype == torch.float32 for shard in shards)


def test_an_optimizer_without_parameters_has_no_shards() -> None:
    assert list(shards_of(SimpleNamespace(is_stub_optimizer=True))) == []
