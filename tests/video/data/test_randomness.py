"""Randomness depend on seed, sample and purpose, and on nothing else."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.run import ConditionConfig, TextDropoutConfig
from megatron_ext.video.data.randomness import (
    Randomness,
    draw_microbatch,
    draw_noise,
    draw_normals,
    draw_uniforms,
    sample_numbers,
)
from tests.ranks import ranks

SHAPE = (4, 3, 8, 8)
MANY = 10_000


def draws(samples: range, seed: int = 7) -> Randomness:
    return draw_microbatch(seed, samples, SHAPE, ConditionConfig(), TextDropoutConfig())


def flat(drawn: Randomness) -> Tensor:
    """All decisions, ``[b, -1]``."""
    fields = [getattr(drawn, field.name) for field in dataclasses.fields(drawn)]
    return torch.cat([x.reshape(len(x), -1).double() for x in fields], dim=1)


def step(dp_rank: int, dp_size: int, num_microbatches: int, consumed: int = 24) -> Tensor:
    """Return what a rank draws in one step, ``[m, b, -1]``, two samples in a micro-batch."""
    return torch.stack(
        [
            flat(draws(sample_numbers(consumed, microbatch, 2, dp_rank, dp_size)))
            for microbatch in range(num_microbatches)
        ]
    )


def check_ranks(context: ParallelContext) -> None:
    """Ranks of a replica draw alike; together the replicas draw what one would."""
    size = context.layout.data_parallel_size
    mine = step(context.dp_rank, size, 4 // size)
    everyone = [torch.empty_like(mine) for _ in range(context.layout.world_size)]
    torch.distributed.all_gather(everyone, mine)
    replicas = torch.tensor([context.dp_rank])
    replica_of = [torch.empty_like(replicas) for _ in everyone]
    torch.distributed.all_gather(replica_of, replicas)
    whole = step(0, 1, 4)
    for drawn, replica in zip(everyone, replica_of, strict=True):
        assert torch.equal(drawn, whole[int(replica) :: size])


@ranks(tp=2, dp=2)
def test_tensor_parallel_ranks_draw_alike_and_replicas_do_not(
    context: ParallelContext,
) -> None:
    check_ranks(context)


@ranks(cp=2, pp=2)
def test_context_and_pipeline_parallel_ranks_draw_alike(context: ParallelContext) -> None:
    check_ranks(context)


def test_samples_differ_in_every_decision() -> None:
    drawn = draws(range(400))
    noise = drawn.noise.flatten(1)
    assert len(torch.unique(noise, dim=0)) == 400
    # Correlations of 768 numbers have a standard deviation of 0.036.
    correlation = torch.corrcoef(noise[:50]).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 0.2
    assert len(torch.unique(drawn.normals)) == 400
    for x in (drawn.modes, drawn.drop_text, drawn.drop_pooled):
        assert len(torch.unique(x)) > 1


def test_purposes_and_seeds_draw_differently() -> None:
    one = draw_noise(7, [3], SHAPE)
    assert not torch.equal(one, draw_noise(7, [3], SHAPE, "sampling noise"))
    assert not torch.equal(one, draw_noise(8, [3], SHAPE))
    # torch's generator on the CPU would take these two seeds for one.
    assert not torch.equal(one, draw_noise(7 + 2**32, [3], SHAPE))
    assert not torch.equal(draw_uniforms(7, [3], "a"), draw_uniforms(7, [3], "b"))


def test_a_resumed_run_draws_on_without_any_state() -> None:
    whole = step(0, 1, 4)
    torch.rand(5)
    assert torch.equal(step(0, 1, 2, consumed=28), whole[2:])


def test_a_sample_draws_alike_in_any_micro_batch() -> None:
    assert torch.equal(flat(draws(range(5, 9)))[2], flat(draws(range(7, 8)))[0])


def test_numbers_are_standard_normal() -> None:
    for x in (draw_noise(1, range(4), (4, 5, 50, 50)), draw_normals(1, range(MANY), "timestep")):
        assert x.dtype == torch.float32
        x, sigma = x.double().flatten(), 1 / math.sqrt(x.numel())
        assert abs(float(x.mean())) < 4 * sigma
        assert float(x.var()) == pytest.approx(1, abs=4 * math.sqrt(2) * sigma)
        assert float((x < 1).double().mean()) == pytest.approx(0.8413, abs=2 * sigma)


def test_rates_of_dropped_captions() -> None:
    config = TextDropoutConfig()
    text = draw_uniforms(5, range(MANY), "text dropout") < config.text_dropout
    pooled = draw_uniforms(5, range(MANY), "pooled dropout") < config.pooled_dropout
    assert float(text.double().mean()) == pytest.approx(0.316, abs=0.015)
    assert float(pooled.double().mean()) == pytest.approx(0.316, abs=0.015)
    assert float((text & pooled).double().mean()) == pytest.approx(0.10, abs=0.01)
    drawn = draws(range(100), seed=5)
    assert torch.equal(drawn.drop_text, text[:100])
    assert torch.equal(drawn.drop_pooled, pooled[:100])
