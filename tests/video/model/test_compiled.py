"""Compiled functions and blocks give what they give as written; attention feeds no copies."""

from collections.abc import Iterator

import pytest
import torch

from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model import joint_pointwise as mmdit
from megatron_ext.video.model import linear
from megatron_ext.video.model.attention import _attend as joint_attention
from megatron_ext.video.networks.wan import pointwise as wan
from megatron_ext.video.networks.wan.attention import AttentionPlan, FrameAttention
from tests.layers.test_compiled import operations
from tests.layers.test_compiled_layers import called, holders
from tests.layers.test_pointwise import (
    LAYER,
    RMS,
    B,
    Case,
    D,
    H,
    N,
    S,
    check_exact,
    check_kernels,
    over,
    t,
)
from tests.layers.test_sdpa import Copies, through
from tests.layers.test_sdpa import S as LENGTH
from tests.ranks import ranks
from tests.video.networks.harness import Problem, Tensors, largest, one
from tests.video.networks.mmdit.problem import Problem as MMDiTProblem
from tests.video.networks.wan.problem import BIDIRECTIONAL
from tests.video.networks.wan.problem import Problem as WanProblem

TEXT = 5
FRAMES = 3


def _mmdit() -> Iterator[Case]:
    x, v, h = t(S, B, H), t(B, H), t(H)
    txt, img = t(TEXT, B, H), t(S - TEXT, B, H)
    table = t(S, B, 1, D // 2, trains=False), t(S, B, 1, D // 2, trains=False)
    yield Case("modulated", linear.modulated_alone, [x, v, v])
    yield Case("modulated beside", mmdit.residual_and_modulated, [x, v, v])
    streams = [x, TEXT, v, v, v, v]
    yield Case("modulated streams", mmdit.residual_and_modulated_streams, streams)
    textless = [x, 0, v, v, v, v]
    yield Case("modulated without text", mmdit.residual_and_modulated_streams, textless)
    frozen = t(B, H, trains=False)
    partly = [x, TEXT, frozen, v, v, frozen]
    yield Case("modulated partly", mmdit.residual_and_modulated_streams, partly)
    yield Case("add gated", mmdit.add_gated, [x, x, x, h, v])
    yield Case("add gated sum", mmdit.add_gated, [x, x, None, h, v])
    added = [x, txt, img, h, h, v, v]
    yield Case("add streams", mmdit.add_streams, added)
    both = [*added, v, v, v, v]
    yield Case("add and modulate", mmdit.add_and_modulate_streams, both)
    single = [t(S, B, 3 * N * D), t(3 * N * D), t(D), t(D), *table, RMS]
    yield Case("MMDiT heads", mmdit.heads, single)
    pair = [t(S - TEXT, B, 3 * N * D), None, t(TEXT, B, 3 * N * D), t(3 * N * D)]
    joint = [*pair, t(D), t(D), t(D), t(D), *table, RMS]
    yield Case("joint heads", mmdit.joint_heads, joint)
    no_text = [t(S, B, 3 * N * D), None, t(0, B, 3 * N * D), None]
    yield Case("joint heads without text", mmdit.joint_heads, [*no_text, *[t(D)] * 4, *table, RMS])


def _wan() -> Iterator[Case]:
    x, v, h = t(S, B, H), t(FRAMES, 1, B, H), t(H)
    yield Case("frames", wan.modulated_frames_alone, [x, v, v])
    yield Case("frames beside", wan.residual_and_modulated, [x, v, v])
    yield Case("gated", wan.gated, [x, x, h, v])
    yield Case("gated and normed", wan.gated_and_normed, [x, x, h, v, h, h, LAYER])
    yield Case("added and modulated", wan.added_and_modulated, [x, x, h, v, v])
    table = [t(FRAMES, S // FRAMES, 1, 1, D // 2, trains=False)] * 2
    qkv, bias, scales = t(S, B, 3 * N * D), t(3 * N * D), [t(N * D), t(N * D)]
    yield Case("sums of squares", wan.squares_of_heads, [qkv, bias, D])
    for total in (None, t(2, S, B, kind="positive")):
        given = [qkv, bias, total, *scales, *table, (D, N * D, 1e-6), 2, FRAMES]
        yield Case(f"video heads, sums given={total is not None}", wan.heads, given)
    q, own = t(S, B, N, D), t(N * D)
    yield Case("whole norm", wan._whole_norm, [q, own, own, N * D, 1e-6])
    yield Case("part's squares", wan._squares, [q, own])
    total = t(S, B, kind="positive")
    yield Case("part's norm", wan._scaled, [q, None, total, own, N * D, 1e-6])


CASES = [*_mmdit(), *_wan()]
QUICK = ("joint heads", "modulated beside", "modulated partly")
BY_KERNELS = (
    *("joint heads", "add and modulate", "joint heads without text"),
    *("modulated beside", "modulated streams", "modulated without text"),
)


@over(CASES, QUICK)
def test_graphs_are_exact(case: Case) -> None:
    check_exact(case, "aot_eager")


@over([x for x in CASES if x.name in BY_KERNELS], ())
def test_kernels_are_exact_and_in_half_precision_no_coarser(case: Case) -> None:
    check_kernels(case)


def test_modulation_with_residual_keeps_the_statistics_of_its_norm() -> None:
    x = torch.randn(S, B, H, requires_grad=True)
    shift, scale = (torch.randn(B, H, requires_grad=True) for _ in range(2))
    alone = operations(mmdit.residual_and_modulated, x, shift, scale)
    streams = operations(mmdit.residual_and_modulated_streams, x, TEXT, shift, scale, shift, scale)
    for (forward, backward), norms in ((alone, 1), (streams, 2)):
        assert forward.count("rsqrt") == norms and "rsqrt" not in backward


TOLERANCES = {MMDiTProblem: 1e-6, WanProblem: 1e-12}
"""The rotary table of an MMDiT is float32 in any type of the model."""
NETWORKS = pytest.mark.parametrize("network", TOLERANCES, ids=["mmdit", "wan"])


def gradients(problem: Problem, context: ParallelContext) -> Tensors:
    chunk = one(problem, context, torch.float64)
    inputs = problem.inputs(dtype=torch.float64)
    if "timesteps" in inputs:
        inputs["timesteps"] = inputs["timesteps"].float()
    output = chunk(**inputs)
    wave = torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view_as(output)
    (output * wave).sum().backward()
    found = {name: p.grad for name, p in chunk.named_parameters() if p.grad is not None}
    return {"": output.detach(), **found}


def check(problem: Problem, context: ParallelContext) -> None:
    want = gradients(problem, context)
    with compiled_on_cpu():
        got = gradients(problem, context)
    assert got.keys() == want.keys()
    worst = {name: largest(got[name], want[name]) for name in want}
    assert max(worst.values()) < TOLERANCES[type(problem)], worst


@pytest.mark.parametrize(
    "problem",
    [
        MMDiTProblem(),
        WanProblem(),
        pytest.param(WanProblem(options=BIDIRECTIONAL), marks=pytest.mark.slow),
    ],
    ids=["mmdit", "wan", "wan twin"],
)
@ranks()
def test_compiled_networks_are_the_eager_ones(context: ParallelContext, problem: Problem) -> None:
    check(problem, context)


@pytest.mark.slow
@NETWORKS
@pytest.mark.parametrize("sequence_parallel", [False, True])
@ranks(tp=2, cp=2)
def test_compiled_networks_are_the_eager_ones_on_ranks(
    context: ParallelContext, network: type[Problem], sequence_parallel: bool
) -> None:
    check(network(sequence_parallel=sequence_parallel), context)  # type: ignore[call-arg]


@NETWORKS
@ranks()
def test_ddp_is_told_of_every_used_weight(context: ParallelContext, network: type[Problem]) -> None:
    problem = network()  # type: ignore[call-arg]
    chunk = one(problem, context)
    names = called(chunk)
    with compiled_on_cpu("eager"):
        chunk(**problem.inputs())
    assert names >= holders(chunk)


@pytest.mark.parametrize("name", ["cudnn", "flash"])
@ranks()
def test_attention_makes_no_mask_and_no_copy(
    context: ParallelContext, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attend jointly to values that are a view of a fused projection, and over all frames."""
    through(name, monkeypatch)
    qkv = torch.empty(LENGTH, B, N, 3, D, device="meta", dtype=torch.bfloat16)
    query, key, value = qkv.unbind(3)
    query, key = query.contiguous(), key.contiguous()
    frames = torch.empty(3, LENGTH, B, N, D, device="meta", dtype=torch.bfloat16)
    attention = FrameAttention(context.pgs.cp, trades_heads=False)
    with Copies() as copies:
        joint = joint_attention(query, key, value, None).flatten(2)
        out = attention(frames, (frames, frames), (), AttentionPlan.bidirectional(3))
    assert joint.is_contiguous() and out.is_contiguous() and copies.found == []
