"""HunyuanVideo against diffusers' own class: velocities, and steps on every kind of layout."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.joint_blocks import JointOptions
from megatron_ext.video.networks.hunyuan.config import SIZES
from megatron_ext.video.networks.hunyuan.cost import flops_of_clip
from tests.ranks import on_ranks, ranks, run_on_ranks
from tests.video.networks.harness import (
    Truth,
    check_step,
    gathered_weights,
    largest,
    layout_of,
    one,
    relative,
    train_step,
    truth,
    write_weights,
)
from tests.video.networks.hunyuan.problem import I2V, Problem, diffusers_model, run_plain, to_plain

TINY = SIZES["tiny"]
SHAPES = {
    "t2v": Problem(sizes=TINY),
    "i2v distilled": Problem(frames=1, num_text=5, lengths=(1, 4)),
    "other sizes": Problem(
        sizes=dataclasses.replace(
            TINY, hidden_size=48, num_heads=3, axes_dim=(4, 4, 8), num_double_blocks=1,
            num_single_blocks=3, num_refiner_blocks=1, mlp_ratio=3, rope_theta=100.0, channels=6,
            guidance_embed=True,
        ),
        batch=1, frames=5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@ranks()
def test_velocities_are_those_of_diffusers(context: ParallelContext, name: str) -> None:
    problem = SHAPES[name]
    chunk, inputs = one(problem, context), problem.inputs()
    model = diffusers_model(problem.sizes)
    model.load_state_dict(to_plain(gathered_weights([chunk]), problem.sizes))
    with torch.no_grad():
        got = chunk(**inputs)
        assert largest(got, run_plain(model, inputs, problem.sizes)) < 1e-5
        assert float(got.abs().max()) > 0.1
        # What is behind a caption's tokens takes part in nothing.
        noise = torch.where(inputs["txt_mask"][..., None], 0.0, torch.randn(inputs["txt"].shape))
        assert largest(chunk(**{**inputs, "txt": inputs["txt"] + noise}), got) < 1e-6
        changed = {x: inputs[x] + 1 for x in ("txt", "y_vec", "guidance", "cond") if x in inputs}
        for key, value in changed.items():
            assert largest(chunk(**{**inputs, key: value}), got) > 1e-3, key
        assert relative(chunk.bfloat16()(**inputs), got) < 0.03


SP: dict[str, Any] = {"sequence_parallel": True}
A2A = JointOptions(cp_comm_type="a2a", recompute_double_blocks=1, recompute_single_blocks=99)
LAYOUTS: dict[str, tuple[dict[str, int], Problem]] = {
    "one": ({}, Problem()),
    "tp2": ({"tp": 2}, Problem()),
    "tp2 dp2": ({"tp": 2, "dp": 2}, Problem()),
    "tp2sp": ({"tp": 2}, Problem(**SP)),
    "pp2": ({"pp": 2}, Problem()),
    "pp2 interleaved": ({"pp": 2, "vpp": 2}, Problem(schedule="interleaved")),
    "cp2": ({"cp": 2}, Problem()),
    "tp2sp cp2 pp2 a2a recomputed": (
        {"tp": 2, "cp": 2, "pp": 2},
        Problem(**SP, options=A2A),
    ),
}


@pytest.fixture(scope="module")
def truth_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Truth]:
    path = tmp_path_factory.mktemp("truths") / "weights"

    @cache
    def of(problem: Any) -> Truth:
        on_ranks(write_weights, {}, problem=problem, path=path)
        return truth(problem, torch.load(path))

    return lambda problem: of(problem.on_one_rank())


def check(context: ParallelContext, problem: Any, want: Truth) -> None:
    check_step(train_step(problem, context), want, 2e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_train_as_diffusers_on_one_process(
    truth_of: Callable[[Any], Truth], name: str
) -> None:
    sizes, problem = LAYOUTS[name]
    want = truth_of(problem)
    assert all(float(gradient.norm()) > 0 for gradient in want.gradients.values())
    run_on_ranks(check, layout_of(sizes, problem.schedule), {"problem": problem, "want": want})


@ranks()
def test_a_caption_without_tokens_is_one_of_its_first_row(context: ParallelContext) -> None:
    problem = Problem()
    chunk, inputs = one(problem, context), problem.inputs()
    mask = torch.zeros_like(inputs["txt_mask"])
    got = chunk(**{**inputs, "txt_mask": mask})
    mask[:, 0] = True
    assert torch.equal(got, chunk(**{**inputs, "txt_mask": mask})) and bool(got.isfinite().all())


@ranks()
def test_operations_are_those_that_torch_counts(context: ParallelContext) -> None:
    for sizes in (I2V, dataclasses.replace(TINY, num_double_blocks=1, num_refiner_blocks=3)):
        problem = Problem(sizes=sizes, batch=1, num_text=9)
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            one(problem, context)(**problem.inputs())
        # The last layer runs on the text too, whose velocity nobody needs.
        in_vain = 2 * 9 * 64 * sizes.token_width
        assert flops_of_clip(sizes, 9, 48) == 3 * (counter.get_total_flops() - in_vain)


@ranks()
def test_inputs_that_do_not_fit_are_refused(context: ParallelContext) -> None:
    chunk, inputs = one(Problem(), context), Problem().inputs()
    for mask in (inputs["txt_mask"][:, 1:], inputs["txt_mask"].float()):
        with pytest.raises(DataError, match=r"`txt_mask` has the shape .* must be \[2, 8\] of"):
            chunk(**{**inputs, "txt_mask": mask})
    with pytest.raises(ConfigError, match="`cond` is missing, but the model was built with"):
        chunk(**{**inputs, "cond": None})
