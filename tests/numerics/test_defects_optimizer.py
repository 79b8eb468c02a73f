"""Defects of megatron-core's optimizers (docs/numerics.md), and what we do instead."""

import math

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron_ext.extras.audit import reproduce_optimizer as stock
from megatron_ext.optim.update import parts_of, update_parameters
from megatron_ext.parallel.context import ParallelContext
from tests.numerics.reproductions import check_ratio
from tests.ranks import ranks


def with_a_bad_gradient(
    *, bf16: bool, distributed: bool
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Build a model, one of whose 48 gradients is NaN, and its optimizer."""
    net = stock.network(torch.bfloat16 if bf16 else torch.float32)
    model, optimizer = stock.trainer(net, shard=distributed, clip_grad=1.0)
    stock.scheduler(optimizer)
    stock.backward(model)
    model.module.matrix.main_grad[0, 0] = math.nan
    return model, optimizer


def test_d21_stock_applies_a_step_whose_norm_is_not_a_number() -> None:
    """One weight is no number then, and after the next step none is."""
    found = check_ratio(stock.d21, {"0.16": 0.0, "0.19": 0.0})
    assert "after the first they are 47" in found.what


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
@ranks(dp=2)
def test_d21_one_bad_gradient_skips_the_step(
    context: ParallelContext, bf16: bool, distributed: bool
) -> None:
    model, optimizer = with_a_bad_gradient(bf16=bf16, distributed=distributed)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = update_parameters(optimizer, clip_grad=1.0)
    assert not result.applied and math.isnan(result.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_d38_stock_gives_matrices_the_rate_of_the_embedding() -> None:
    check_ratio(stock.d38, {"0.16": 0.1, "0.19": 1.0})


def test_d39_stock_scales_gradients_of_experts_otherwise_than_the_loss() -> None:
    """Core divides the gradients of the experts by 8 for ever, and multiplies the loss by 4."""
    check_ratio(stock.d39, {"0.16": 2.0, "0.19": 2.0})


@ranks(dp=2, ep=2)
def test_d39_dense_weights_and_experts_have_one_loss_scale(context: ParallelContext) -> None:
    _, optimizer = stock.with_a_dense_overflow()
    assert not update_parameters(optimizer, clip_grad=1.0).applied
    assert [float(part.get_loss_scale()) for part in parts_of(optimizer)] == [4.0, 4.0]


def test_d40_stock_goes_on_with_the_rate_of_the_checkpoint() -> None:
    """0.19 cannot go on at all, because the rate is part of what identifies a group."""
    found = check_ratio(stock.d40, {"0.16": 1 / 3, "0.19": math.nan})
    assert ("KeyError" in found.what) is math.isnan(found.stock)


def test_d41_stock_shifts_what_follows_the_padding_of_a_bucket() -> None:
    """Half of the weights, behind the padding, become 0."""
    found = check_ratio(stock.d41, {"0.16": 0.0, "0.19": 0.0})
    assert "50% of 48 weights are wrong" in found.what
