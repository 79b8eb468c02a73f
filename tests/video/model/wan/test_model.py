"""The network on one rank against plain torch, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.wan import SIZES
from megatron_ext.video.loss import flow_from_x0, x0_from_flow
from megatron_ext.video.model.wan.attention import FrameWindow
from megatron_ext.video.model.wan.options import VideoDiTOptions
from megatron_ext.video.model.wan.pointwise import FullWidthRMSNorm
from tests.ranks import ranks
from tests.video.model.wan.problem import (
    BIDIRECTIONAL,
    CAUSAL,
    Problem,
    frames_of,
    new_cache,
    plain_of,
)
from tests.video.networks import core_config, largest, one


@pytest.mark.parametrize("options", [CAUSAL, BIDIRECTIONAL], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("first_frame", [0, 1200])
@ranks()
def test_flow_is_that_of_plain_torch(
    context: ParallelContext, options: VideoDiTOptions, first_frame: int
) -> None:
    """Also beyond the 1024 frames of the original's rotary table."""
    problem = Problem(options=options, frames=21)
    chunk, inputs = one(problem, context, torch.float64), problem.inputs(dtype=torch.float64)
    want = plain_of(chunk)(**inputs, rule=problem.rule, first_frame=first_frame)
    got = chunk(**inputs, first_frame=first_frame)
    assert got.shape == inputs["x"].shape
    assert float(want.detach().abs().max()) > 0.1
    assert largest(got, want) < 1e-12
    assert sum(p.numel() for p in chunk.parameters()) == problem.sizes.num_parameters


@ranks()
def test_one_timestep_of_a_sample_is_that_of_all_frames(context: ParallelContext) -> None:
    problem = Problem(options=BIDIRECTIONAL)
    chunk, inputs = one(problem, context), problem.inputs()
    inputs["timesteps"] = torch.tensor([20.0, 937.5])
    got = chunk(**inputs)
    inputs["timesteps"] = inputs["timesteps"][:, None].expand(2, problem.frames)
    assert largest(got, chunk(**inputs)) < 1e-6


@ranks()
def test_a_timestep_changes_its_own_frame_only(context: ParallelContext) -> None:
    """Where attention adds nothing, in one block; with attention the others change too."""
    problem = Problem(sizes=dataclasses.replace(SIZES["tiny"], num_blocks=1))
    chunk, inputs = one(problem, context), problem.inputs()
    moved = dict(inputs, timesteps=inputs["timesteps"].clone())
    moved["timesteps"][:, 4] += 100
    changed = (chunk(**moved) - chunk(**inputs)).detach().abs().amax(dim=(0, 2, 3, 4))
    assert changed[3] > 0 and changed[5] > 0
    projection = chunk.blocks["0"].self_attention.linear_proj
    torch.nn.init.zeros_(projection.weight)
    torch.nn.init.zeros_(projection.bias)
    changed = (chunk(**moved) - chunk(**inputs)).detach().abs().amax(dim=(0, 2, 3, 4))
    assert changed.nonzero().flatten().tolist() == [4]


@ranks()
def test_the_twin_has_the_same_parameters(context: ParallelContext) -> None:
    student = one(Problem(), context)
    twin = one(Problem(options=BIDIRECTIONAL), context)
    twin.load_state_dict(student.state_dict())
    inputs = Problem().inputs()
    first = {**inputs, **frames_of(inputs, 0, 3)}
    # Of one block alone the two see the same.
    assert largest(student(**first), twin(**first)) < 1e-6
    assert largest(student(**inputs)[:, :3], twin(**inputs)[:, :3]) > 1e-3


@ranks()
def test_a_zero_head_predicts_zero_and_learns(context: ParallelContext) -> None:
    problem = Problem(options=dataclasses.replace(CAUSAL, zero_head=True))
    chunk = one(problem, context)
    with torch.no_grad():
        chunk.head.linear.bias.zero_()
    flow = chunk(**problem.inputs())
    assert not flow.any()
    (flow - problem.target()).square().mean().backward()
    assert chunk.head.linear.weight.grad.norm() > 0


@ranks()
def test_frames_that_are_no_whole_blocks_are_refused(context: ParallelContext) -> None:
    problem = Problem(frames=8)
    chunk = one(problem, context)
    with pytest.raises(DataError, match=r"`num_frames` \(8\) must be a multiple of the frame blo"):
        chunk(**problem.inputs())
    with pytest.raises(DataError, match=r"`first_frame` \(2\) must be a multiple of the frame bl"):
        chunk(**Problem().inputs(), first_frame=2)


@ranks()
def test_caches_that_do_not_fit_are_refused(context: ParallelContext) -> None:
    problem = Problem()
    chunk, inputs = one(problem, context), problem.inputs()
    twin = one(Problem(options=BIDIRECTIONAL), context)
    with pytest.raises(ConfigError, match="a cache needs a causal model on one pipeline stage"):
        new_cache(twin, problem)
    with pytest.raises(ConfigError, match="must be that of the model and its inputs"):
        twin(**inputs, cache=new_cache(chunk, problem))
    narrow = dataclasses.replace(problem, width=4)
    with pytest.raises(ConfigError, match="must be that of the model and its inputs"):
        chunk(**inputs, cache=new_cache(chunk, narrow))
    other = dataclasses.replace(CAUSAL, window=FrameWindow(3, 6, 0))
    with pytest.raises(ConfigError, match="must be that of the model and its inputs"):
        chunk(**inputs, cache=new_cache(one(Problem(options=other), context), problem))


def test_flow_and_clean_latents_are_inverse() -> None:
    generator = torch.Generator().manual_seed(3)
    x0, noise = (torch.randn(2, 3, 4, 2, 2, generator=generator) for _ in range(2))
    for sigma in (torch.tensor([0.02, 0.98]), torch.rand(2, 3, generator=generator) + 0.01):
        spread = sigma.view(*sigma.shape, *[1] * (5 - sigma.dim()))
        x_t = (1 - spread) * x0 + spread * noise
        assert largest(x0_from_flow(x_t, noise - x0, sigma), x0) < 1e-6
        assert largest(flow_from_x0(x_t, x0, sigma), noise - x0) < 2e-5
    assert x0_from_flow(x_t.bfloat16(), noise, sigma).dtype == torch.bfloat16


@ranks(tp=4)
def test_the_mean_is_that_of_all_heads_with_its_gradient(context: ParallelContext) -> None:
    """Output, gradient of the input and of the scales equal torch's RMSNorm over all 64."""
    rank, group = context.tp_rank, context.pgs.tp
    config = core_config(Problem(), context)
    generator = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, scales, upstream = randn(2, 6, 3, 4, 16), randn(2, 64), randn(2, 6, 3, 4, 16)
    norms = [FullWidthRMSNorm(config, group).double() for _ in range(2)]
    for norm, scale in zip(norms, scales, strict=True):
        norm.weight.data.copy_(scale.chunk(4)[rank])
    own = [part.chunk(4, dim=-2)[rank].clone().requires_grad_() for part in x]
    got = [norm(x) for norm, x in zip(norms, own, strict=True)]
    pairs = zip(got, upstream, strict=True)
    sum((y * u.chunk(4, dim=-2)[rank]).sum() for y, u in pairs).backward()  # type: ignore[union-attr]
    for index, norm in enumerate(norms):
        whole, weight = x[index].clone().requires_grad_(), scales[index].clone().requires_grad_()
        want = F.rms_norm(whole.flatten(-2), (64,), weight, eps=1e-6).view_as(whole)
        (want * upstream[index]).sum().backward()
        assert weight.grad is not None and whole.grad is not None
        cut = want.chunk(4, dim=-2)[rank], whole.grad.chunk(4, dim=-2)[rank], weight.grad.chunk(4)
        torch.testing.assert_close(got[index], cut[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(own[index].grad, cut[1], rtol=0, atol=1e-12)
        torch.testing.assert_close(norm.weight.grad, cut[2][rank], rtol=0, atol=1e-12)
