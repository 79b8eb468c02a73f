"""An MMDiT on one rank: against plain torch, its starts, its inputs, and recomputation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.mmdit import SIZES
from megatron_ext.video.model.mmdit.inputs import timestep_sinusoid
from megatron_ext.video.model.mmdit.options import MMDiTOptions
from tests.ranks import ranks
from tests.video.model.mmdit.problem import Problem
from tests.video.networks import gathered_weights, one, relative, train_step


@ranks()
def test_velocity_is_that_of_plain_torch(context: ParallelContext) -> None:
    problem = Problem()
    chunk, batch = one(problem, context), problem.inputs()
    plain = problem.plain_model(gathered_weights([chunk]))
    want = plain(**{k: v.double() for k, v in batch.items()})
    got = chunk(**batch)
    assert got.shape == (2, 48, 16)
    assert relative(got, want.detach()) < 1e-6
    assert sum(p.numel() for p in chunk.parameters()) == problem.sizes.num_parameters


@ranks()
def test_condition_branch_starts_without_effect(context: ParallelContext) -> None:
    with_cond = Problem(sizes=dataclasses.replace(SIZES["tiny"], cond_embed=True))
    i2v, t2v = one(with_cond, context), one(Problem(sizes=SIZES["tiny"]), context)
    batch = with_cond.inputs()
    got = i2v(**batch)
    cond = batch.pop("cond")
    assert torch.equal(got, t2v(**batch))
    assert torch.equal(got, i2v(**batch, cond=100 * cond))
    assert float(got.detach().abs().max()) > 0.01


@ranks()
def test_adaln_zero_starts_at_the_mean_square(context: ParallelContext) -> None:
    problem = Problem(options=MMDiTOptions(adaln_zero=True), mask="all")
    batches = [problem.microbatch(i) for i in range(problem.num_microbatches)]
    wanted = torch.stack([b["target"].double().square().mean() for b in batches]).mean()
    step = train_step(problem, context)
    assert step.loss == pytest.approx(float(wanted), rel=1e-6)
    # It learns all the same: the last layer from the first step on.
    (chunk,) = step.chunks
    assert chunk.final_layer is not None
    assert chunk.final_layer.linear.weight.main_grad.norm() > 0


@ranks()
def test_recomputation_changes_nothing(context: ParallelContext) -> None:
    losses, gradients, runs = [], [], []
    for double, single in [(0, 0), (1, 2), (100, 100)]:
        options = MMDiTOptions(recompute_double_blocks=double, recompute_single_blocks=single)
        with counted_forward_passes() as calls:
            step = train_step(Problem(options=options), context)
        losses.append(step.loss)
        gradients.append([p.main_grad.clone() for p in step.chunks[0].parameters()])
        runs.append(calls["blocks"])
    assert losses[0] == losses[1] == losses[2]
    for other in gradients[1:]:
        for mine, want in zip(other, gradients[0], strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-7)
    # Two micro-batches through four blocks, and again through those recomputed.
    assert runs == [8, 8 + 2 * 3, 8 + 2 * 4]


class counted_forward_passes:
    """Counts the runs of blocks."""

    def __enter__(self) -> dict[str, int]:
        from megatron_ext.video.model.mmdit.blocks import DoubleBlock, SingleBlock

        self.calls = {"blocks": 0}

        def count(module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
            self.calls["blocks"] += isinstance(module, (DoubleBlock, SingleBlock))

        self.hook = torch.nn.modules.module.register_module_forward_hook(count)
        return self.calls

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


@ranks()
def test_inputs_are_never_swallowed(context: ParallelContext) -> None:
    """Neither a misspelt input, nor one that the model has no use for, nor a missing one."""
    problem = Problem(sizes=SIZES["tiny"])
    chunk, batch = one(problem, context), problem.inputs()
    with pytest.raises(TypeError, match="unexpected keyword argument 'guidence'"):
        chunk(**batch, guidence=torch.ones(2))
    with pytest.raises(ConfigError, match="`guidance` was given, but .* without `guidance_embed`"):
        chunk(**batch, guidance=torch.ones(2))
    with pytest.raises(ConfigError, match="`cond` was given, but .* without `cond_embed`"):
        chunk(**batch, cond=torch.ones(2, 48, 20))
    full = Problem()
    needs, batch = one(full, context), full.inputs()
    del batch["cond"]
    with pytest.raises(ConfigError, match="`cond` is missing, but .* built with `cond_embed`"):
        needs(**batch)


@ranks()
def test_guidance_and_condition_have_an_effect(context: ParallelContext) -> None:
    problem = Problem()
    chunk, batch = one(problem, context), problem.inputs()
    torch.nn.init.normal_(chunk.embedding.cond_in.weight)  # type: ignore[union-attr]
    base = chunk(**batch)
    for name in ("cond", "guidance"):
        other = chunk(**{**batch, name: batch[name] + 1})
        assert float((other - base).detach().abs().max()) > 1e-3, name


@ranks()
def test_adapters_are_refused(context: ParallelContext) -> None:
    """They would reduce on their own what the block reduces in common."""
    problem = Problem()
    for name in ("linear_fc1", "linear_proj"):
        chunk = one(problem, context)
        getattr(chunk.single_blocks["1"], name).lora = torch.nn.Identity()
        with pytest.raises(ConfigError, match="`--lora-rank` cannot be used with an MMDiT"):
            chunk(**problem.inputs())


def test_cosines_come_before_sines() -> None:
    u = torch.tensor([0.0, 0.25, 1.0])
    got = timestep_sinusoid(u)
    assert got.shape == (3, 256)
    assert got[0].tolist() == [1.0] * 128 + [0.0] * 128
    for j in (0, 1, 77, 127):
        angle = 250.0 * math.exp(-math.log(10000) * j / 128)
        assert float(got[1, j]) == pytest.approx(math.cos(angle), abs=1e-4)
        assert float(got[1, 128 + j]) == pytest.approx(math.sin(angle), abs=1e-4)


def test_timesteps_keep_float32() -> None:
    """Two timesteps that are one in bfloat16 are told apart."""
    u = torch.tensor([0.7001, 0.7011])
    assert u.bfloat16()[0] == u.bfloat16()[1]
    first, second = timestep_sinusoid(u)
    assert (first - second).abs().max() > 0.5
