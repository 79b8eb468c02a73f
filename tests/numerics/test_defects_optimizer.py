"""Defects of megatron-core's optimizer (docs/numerics.md), and what we do instead."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import AdamOptimizerConfig, MegatronOptimizer, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from megatron_ext.optim.update import parts_of, update_parameters
from megatron_ext.parallel.context import ParallelContext
from tests.ranks import ranks


class _Net(MegatronModule):  # type: ignore[misc]
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.arange(24.0).view(6, 4))
        self.bias = torch.nn.Parameter(torch.ones(6))


def with_a_bad_gradient(
    *, bf16: bool, distributed: bool
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Build a model, one of whose 30 gradients is NaN, and its optimizer."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, bf16=bf16, params_dtype=dtype
    )
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
        ),
        _Net(config).to(dtype),
    )
    core = AdamOptimizerConfig(
        lr=0.1,
        bf16=bf16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(core, [model])
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    model.zero_grad_buffer()
    for parameter in model.parameters():
        parameter.main_grad.fill_(0.5)
    model.module.bias.main_grad[0] = math.nan
    model.finish_grad_sync()
    return model, optimizer


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
@ranks(dp=2)
def test_d21_one_bad_gradient_skips_the_step(
    context: ParallelContext, bf16: bool, distributed: bool
) -> None:
    """Core applies it: the weight is no number, and after the next loss no weight is."""
    stock, optimizer = with_a_bad_gradient(bf16=bf16, distributed=distributed)
    assert optimizer.step()[0]
    assert sum(int(parameter.isnan().sum()) for parameter in stock.parameters()) == 1

    model, optimizer = with_a_bad_gradient(bf16=bf16, distributed=distributed)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = update_parameters(optimizer, clip_grad=1.0)
    assert not result.applied and math.isnan(result.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def with_a_dense_overflow() -> MegatronOptimizer:
    """Build an fp16 optimizer with infinite dense gradients and finite ones of its expert."""
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, fp16=True, params_dtype=torch.float16
    )
    net = _Net(config).to(torch.float16)
    net.bias.allreduce = False  # how megatron-core marks the weights of experts
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), net)
    core = AdamOptimizerConfig(
        lr=0.1, fp16=True, params_dtype=torch.float16, initial_loss_scale=8.0, hysteresis=1
    )
    optimizer = get_megatron_optimizer(core, [model])
    model.zero_grad_buffer()
    net.weight.main_grad.fill_(math.inf)
    net.bias.main_grad.fill_(0.5)
    return optimizer


@ranks(dp=2, ep=2)
def test_d39_dense_weights_and_experts_have_one_loss_scale(context: ParallelContext) -> None:
    """Core divides the gradients of the experts by 8 for ever, and multiplies the loss by 4."""
    stock = with_a_dense_overflow()
    assert not stock.step()[0]
    assert [float(part.get_loss_scale()) for part in parts_of(stock)] == [4.0, 8.0]

    optimizer = with_a_dense_overflow()
    assert not update_parameters(optimizer, clip_grad=1.0).applied
    assert [float(part.get_loss_scale()) for part in parts_of(optimizer)] == [4.0, 4.0]
