"""Both networks on one rank: against plain torch, their starts, and what they refuse."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.joint_blocks import DoubleBlock, JointOptions, SingleBlock
from megatron_ext.video.model.joint_chunk import check_inputs as check_mmdit_inputs
from megatron_ext.video.model.joint_chunk import timestep_sinusoid
from megatron_ext.video.model.window import FrameWindow
from megatron_ext.video.networks.mmdit.config import SIZES as MMDIT_SIZES
from megatron_ext.video.networks.wan.attention import VideoDiTOptions
from megatron_ext.video.networks.wan.blocks import check_inputs as check_wan_inputs
from tests.ranks import ranks
from tests.video.networks.harness import (
    Problem,
    build,
    core_config,
    gathered_weights,
    largest,
    one,
    relative,
    train_step,
)
from tests.video.networks.mmdit.problem import Problem as MMDiTProblem
from tests.video.networks.wan.plain import num_parameters
from tests.video.networks.wan.problem import BIDIRECTIONAL, CAUSAL, frames_of, new_cache, plain_of
from tests.video.networks.wan.problem import Problem as WanProblem

NETWORKS = pytest.mark.parametrize("network", [MMDiTProblem, WanProblem], ids=["mmdit", "wan"])


@ranks()
def test_velocity_of_an_mmdit_is_that_of_plain_torch(context: ParallelContext) -> None:
    problem = MMDiTProblem()
    chunk, batch = one(problem, context), problem.inputs()
    plain = problem.plain_model(gathered_weights([chunk]))
    want = plain(**{k: v.double() for k, v in batch.items()})
    got = chunk(**batch)
    assert got.shape == (2, 48, 16)
    assert relative(got, want.detach()) < 1e-6
    assert sum(p.numel() for p in chunk.parameters()) == num_parameters(problem.sizes)
    torch.nn.init.normal_(chunk.embedding.cond_in.weight)
    base = chunk(**batch)
    for name in ("cond", "guidance"):
        assert largest(chunk(**{**batch, name: batch[name] + 1}), base) > 1e-3, name


@pytest.mark.parametrize("options", [CAUSAL, BIDIRECTIONAL], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("first_frame", [0, 1200])
@ranks()
def test_flow_of_wan(context: ParallelContext, options: VideoDiTOptions, first_frame: int) -> None:
    """Compare also beyond the 1024 frames of the original's rotary table."""
    problem = WanProblem(options=options, frames=21)
    chunk, inputs = one(problem, context, torch.float64), problem.inputs(dtype=torch.float64)
    want = plain_of(chunk)(**inputs, rule=problem.rule, first_frame=first_frame)
    got = chunk(**inputs, first_frame=first_frame)
    assert got.shape == inputs["x"].shape
    assert float(want.detach().abs().max()) > 0.1
    assert largest(got, want) < 1e-12
    assert sum(p.numel() for p in chunk.parameters()) == num_parameters(problem.sizes)


@NETWORKS
@ranks()
def test_bfloat16_gives_nearly_the_float32_output(context: ParallelContext, network: Any) -> None:
    chunk, inputs = one(network(), context), network().inputs()
    want = chunk(**inputs)
    got = chunk.bfloat16()(**inputs)
    assert got.dtype == torch.bfloat16
    assert relative(got, want.detach()) < 0.03


@ranks()
def test_conditions_start_without_effect_and_adaln_zero_at_means(context: ParallelContext) -> None:
    with_cond = MMDiTProblem(sizes=dataclasses.replace(MMDIT_SIZES["tiny"], cond_embed=True))
    i2v, t2v = one(with_cond, context), one(MMDiTProblem(sizes=MMDIT_SIZES["tiny"]), context)
    batch = with_cond.inputs()
    got = i2v(**batch)
    cond = batch.pop("cond")
    assert torch.equal(got, t2v(**batch))
    assert torch.equal(got, i2v(**batch, cond=100 * cond))
    assert float(got.detach().abs().max()) > 0.01
    problem = MMDiTProblem(options=JointOptions(adaln_zero=True), mask="all")
    batches = [problem.microbatch(i) for i in range(problem.num_microbatches)]
    wanted = torch.stack([b["target"].double().square().mean() for b in batches]).mean()
    step = train_step(problem, context)
    assert step.loss == pytest.approx(float(wanted), rel=1e-6)
    # It learns all the same: the last layer from the first step on.
    (chunk,) = step.chunks
    assert chunk.final_layer is not None
    assert chunk.final_layer.linear.weight.main_grad.norm() > 0


@ranks()
def test_wan_starts_at_zero_and_its_twin_has_the_same_parameters(context: ParallelContext) -> None:
    problem = WanProblem(options=dataclasses.replace(CAUSAL, zero_head=True))
    chunk = one(problem, context)
    with torch.no_grad():
        chunk.head.linear.bias.zero_()
    flow = chunk(**problem.inputs())
    assert not flow.any()
    (flow - problem.target()).square().mean().backward()
    assert chunk.head.linear.weight.grad.norm() > 0
    student = one(WanProblem(), context)
    twin = one(WanProblem(options=BIDIRECTIONAL), context)
    twin.load_state_dict(student.state_dict())
    inputs = WanProblem().inputs()
    first = {**inputs, **frames_of(inputs, 0, 3)}
    # Of one block alone the two see the same.
    assert largest(student(**first), twin(**first)) < 1e-6
    assert largest(student(**inputs)[:, :3], twin(**inputs)[:, :3]) > 1e-3


@ranks()
def test_recomputation_of_an_mmdit_changes_nothing(context: ParallelContext) -> None:
    losses, gradients, runs, calls = [], [], [], []
    blocks = DoubleBlock | SingleBlock
    hook = register_module_forward_hook(lambda x, *_: calls.append(isinstance(x, blocks)))
    for double, single in [(0, 0), (1, 2), (100, 100)]:
        options = JointOptions(recompute_double_blocks=double, recompute_single_blocks=single)
        calls.clear()
        step = train_step(MMDiTProblem(options=options), context)
        losses.append(step.loss)
        gradients.append([p.main_grad.clone() for p in step.chunks[0].parameters()])
        runs.append(sum(calls))
    hook.remove()
    assert losses[0] == losses[1] == losses[2]
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-6, atol=1e-7)
    # Two micro-batches through four blocks, and again through those recomputed.
    assert runs == [8, 8 + 2 * 3, 8 + 2 * 4]


def test_timesteps_are_embedded_in_float32_with_cosines_before_sines() -> None:
    got = timestep_sinusoid(torch.tensor([0.0, 0.25, 1.0]))
    assert got.shape == (3, 256)
    assert got[0].tolist() == [1.0] * 128 + [0.0] * 128
    for j in (0, 1, 77, 127):
        angle = 250.0 * math.exp(-math.log(10000) * j / 128)
        assert float(got[1, j]) == pytest.approx(math.cos(angle), abs=1e-4)
        assert float(got[1, 128 + j]) == pytest.approx(math.sin(angle), abs=1e-4)
    # Two timesteps that are one in bfloat16 are told apart.
    u = torch.tensor([0.7001, 0.7011])
    assert u.bfloat16()[0] == u.bfloat16()[1]
    first, second = timestep_sinusoid(u)
    assert (first - second).abs().max() > 0.5


@ranks()
def test_inputs_of_an_mmdit_are_never_swallowed(context: ParallelContext) -> None:
    """Refuse a misspelt input, one that the model has no use for, and a missing one."""
    bare, full = MMDiTProblem(sizes=MMDIT_SIZES["tiny"]), MMDiTProblem()
    chunk, batch = one(bare, context), bare.inputs()
    with pytest.raises(TypeError, match="unexpected keyword argument 'guidence'"):
        chunk(**batch, guidence=torch.ones(2))
    for name in ("guidance", "cond"):
        with pytest.raises(ConfigError, match=f"`{name}` was given, but .* without `{name}_embed`"):
            chunk(**batch, **{name: full.inputs()[name]})
    batch = full.inputs()
    del batch["cond"]
    with pytest.raises(ConfigError, match="`cond` is missing, but .* built with `cond_embed`"):
        one(full, context)(**batch)


@pytest.mark.parametrize(
    ("problem", "name", "value", "message"),
    [
        (MMDiTProblem(), "qk_layernorm", False, r"\(False\) must be True for this MMDiT"),
        (WanProblem(), "ffn_hidden_size", 96, r"\(96\) must be 128 for this video DiT"),
    ],
)
@ranks()
def test_a_configuration_of_other_sizes_is_refused(
    context: ParallelContext, problem: Problem, name: str, value: Any, message: str
) -> None:
    config = core_config(problem, context)
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=f"`{name}` {message}"):
        problem.network.build(problem.sizes, problem.options, config, context)


@ranks(cp=2, tp=4)
def test_heads_of_an_mmdit_that_cannot_be_traded_are_refused(context: ParallelContext) -> None:
    with pytest.raises(ConfigError, match=r"a2a needs the attention heads .* \(1\) to be divis"):
        build(MMDiTProblem(options=JointOptions(cp_comm_type="a2a")), context)


@ranks(cp=3)
def test_layouts_that_cannot_share_heads_or_frames_are_refused(context: ParallelContext) -> None:
    with pytest.raises(ConfigError, match=r"a2a needs the attention heads .* \(4\) to be divis"):
        build(WanProblem(options=VideoDiTOptions(cp_comm_type="a2a")), context)
    problem = WanProblem()
    with pytest.raises(DataError, match="a frame of 2 x 4 = 8 tokens must be divisible by the"):
        one(problem, context)(**problem.inputs())


MMDIT_INPUTS: list[tuple[str, Any, str]] = [
    ("img", lambda x: x[..., :-1], r"`img` has the shape \[2, 48, 15\], but .* \[2, 48, 16\]"),
    ("y_vec", lambda x: x[:1], r"`y_vec` has the shape \[1, 16\]"),
    ("txt_ids", lambda x: x[:, 1:], r"`txt` has the shape \[2, 8, 32\]"),
    ("img_ids", lambda x: x[0], r"`img_ids` has the shape \[48, 3\], but must be \[batch"),
    ("img", lambda x: None, "`img` is None, but every stage needs the ids, and the first all"),
    ("timesteps", lambda x: x.bfloat16(), "`timesteps` has the type torch.bfloat16, but"),
]
WAN_INPUTS: list[tuple[str, Any, str]] = [
    ("x", lambda x: x[0], r"`x` has the shape \[9, 4, 4, 8\], but the model takes \[b, t, 4"),
    ("x", lambda x: x.transpose(1, 2), r"`x` has the shape \[2, 4, 9, 4, 8\]"),
    ("x", lambda x: x[:, :8], r"`timesteps` has the shape \[2, 9\], but must be \[2\] for"),
    ("timesteps", lambda x: x.bfloat16(), "`timesteps` has the type torch.bfloat16, but"),
    ("text", lambda x: x[:, :, 1:], r"`text` has the shape \[2, 5, 31\], but must be \[2, l"),
    ("text", lambda x: x[:1], r"`text` has the shape \[1, 5, 32\]"),
    ("x", lambda x: x[..., :7], "Latents of 4 x 7 must be divisible by the patch size"),
]


@pytest.mark.parametrize(
    ("network", "name", "change", "message"),
    [(n, *case) for n, cases in ((MMDiTProblem, MMDIT_INPUTS), (WanProblem, WAN_INPUTS))
     for case in cases],
)  # fmt: skip
@ranks()
def test_inputs_that_do_not_fit_are_refused(
    context: ParallelContext, network: Any, name: str, change: Any, message: str
) -> None:
    inputs = network().inputs()
    inputs[name] = change(inputs[name])
    with pytest.raises(DataError, match=message):
        one(network(), context)(**inputs)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("guidance", lambda x: x.half(), "`guidance` has the type torch.float16, but must be"),
        ("timesteps", lambda x: x.long(), "`timesteps` has the type torch.int64, but must be"),
        ("guidance", lambda x: x[:1], r"`guidance` has the shape \[1\], but .* \[2\]"),
        ("cond", lambda x: x[:, 1:], r"`cond` has the shape \[2, 47, 20\]"),
        ("img_ids", lambda x: x[..., :2], r"`img_ids` has the shape \[2, 48, 2\]"),
        ("txt_ids", lambda x: x[:1], r"`txt_ids` has the shape \[1, 8, 3\]"),
        ("txt_ids", lambda x: None, "`txt_ids` is None, but every stage needs the ids"),
    ],
)
def test_each_input_of_an_mmdit_is_looked_at(name: str, change: Any, message: str) -> None:
    problem = MMDiTProblem()
    inputs: dict[str, Any] = dict(problem.inputs())
    check_mmdit_inputs(problem.sizes, inputs, is_first_stage=True)
    # Stages after the first are given the ids alone.
    later = {key: value if key.endswith("_ids") else None for key, value in inputs.items()}
    check_mmdit_inputs(problem.sizes, later, is_first_stage=False)
    inputs[name] = change(inputs[name])
    with pytest.raises(DataError, match=message):
        check_mmdit_inputs(problem.sizes, inputs, is_first_stage=True)
    if name.endswith("_ids"):
        with pytest.raises(DataError, match=f"`{name}`"):
            check_mmdit_inputs(problem.sizes, {**later, name: inputs[name]}, is_first_stage=False)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x: x[:, :0]),
        ("timesteps", lambda x: x[:, :-1]),
        ("timesteps", lambda x: x[:, :1]),
        ("timesteps", lambda x: x[..., None]),
        ("timesteps", lambda x: x.long()),
        ("timesteps", lambda x: x.half()),
        ("text", lambda x: x[:, :0]),
        ("text", lambda x: x[0]),
    ],
)
def test_each_input_of_wan_is_looked_at(name: str, change: Any) -> None:
    problem = WanProblem()
    inputs: dict[str, Any] = dict(problem.inputs())
    for timesteps in (inputs["timesteps"], inputs["timesteps"][:, 0], inputs["timesteps"].double()):
        check_wan_inputs(problem.sizes, **{**inputs, "timesteps": timesteps})
    inputs[name] = change(inputs[name])
    with pytest.raises(DataError, match=f"`{name}` has the"):
        check_wan_inputs(problem.sizes, **inputs)


@ranks()
def test_frames_and_caches_that_do_not_fit_wan_are_refused(context: ParallelContext) -> None:
    problem = WanProblem(frames=8)
    chunk = one(problem, context)
    with pytest.raises(DataError, match=r"`num_frames` \(8\) must be a multiple of the frame blo"):
        chunk(**problem.inputs())
    with pytest.raises(DataError, match=r"`first_frame` \(2\) must be a multiple of the frame bl"):
        chunk(**WanProblem().inputs(), first_frame=2)
    problem = WanProblem()
    chunk, inputs = one(problem, context), problem.inputs()
    twin = one(WanProblem(options=BIDIRECTIONAL), context)
    with pytest.raises(ConfigError, match="a cache needs a causal model on one pipeline stage"):
        new_cache(twin, problem)
    narrow = new_cache(chunk, dataclasses.replace(problem, width=4))
    options = dataclasses.replace(CAUSAL, window=FrameWindow(3, 6, 0))
    other = new_cache(one(WanProblem(options=options), context), problem)
    for model, cache in ((twin, new_cache(chunk, problem)), (chunk, narrow), (chunk, other)):
        with pytest.raises(ConfigError, match="must be that of the model and its inputs"):
            model(**inputs, cache=cache)
