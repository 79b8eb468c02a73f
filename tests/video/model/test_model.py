"""Both networks on one rank: precision, and configurations and layouts that they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.mmdit.options import MMDiTOptions
from megatron_ext.video.model.wan.options import VideoDiTOptions
from tests.ranks import ranks
from tests.video.model.mmdit.problem import Problem as MMDiTProblem
from tests.video.model.wan.problem import Problem as WanProblem
from tests.video.networks import Problem, build, core_config, one, relative

NETWORKS = pytest.mark.parametrize("network", [MMDiTProblem, WanProblem], ids=["mmdit", "wan"])


@NETWORKS
@ranks()
def test_bfloat16_gives_nearly_the_output_of_float32(
    context: ParallelContext, network: Any
) -> None:
    chunk, inputs = one(network(), context), network().inputs()
    want = chunk(**inputs)
    got = chunk.bfloat16()(**inputs)
    assert got.dtype == torch.bfloat16
    assert relative(got, want.detach()) < 0.03


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
        problem.network(config, problem.sizes, problem.options, context.pgs)


@ranks(cp=2, tp=4)
def test_heads_of_an_mmdit_that_cannot_be_traded_are_refused(context: ParallelContext) -> None:
    with pytest.raises(ConfigError, match=r"a2a needs the attention heads .* \(1\) to be divis"):
        build(MMDiTProblem(options=MMDiTOptions(cp_comm_type="a2a")), context)


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
