"""The model on one rank: against plain torch, its starts, its refusals, and recomputation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.mmdit import SIZES
from megatron_ext.video.model.mmdit.model import MMDiT
from megatron_ext.video.model.mmdit.options import MMDiTOptions
from tests.ranks import ranks
from tests.video.model.mmdit.problem import (
    I2V,
    Problem,
    build,
    gathered_weights,
    gradient_errors,
    plain_model,
    train_step,
    truth,
)


def one(problem: Problem, context: ParallelContext) -> MMDiT:
    _, (chunk,) = build(problem, context)
    return chunk


def inputs(problem: Problem) -> dict[str, Tensor]:
    batch = problem.microbatch(0)
    del batch["target"], batch["mask"]
    return batch


@ranks()
def test_velocity_is_that_of_plain_torch(context: ParallelContext) -> None:
    problem = Problem()
    chunk, batch = one(problem, context), inputs(problem)
    plain = plain_model(gathered_weights([chunk]), problem.sizes)
    want = plain(**{k: v.double() for k, v in batch.items()})
    got = chunk(**batch)
    assert got.shape == (2, 48, 16)
    assert float((got - want).detach().norm() / want.detach().norm()) < 1e-6
    assert sum(p.numel() for p in chunk.parameters()) == problem.sizes.num_parameters


@ranks()
def test_criterion_8_condition_branch_starts_without_effect(context: ParallelContext) -> None:
    with_cond = Problem(sizes=dataclasses.replace(SIZES["tiny"], cond_embed=True))
    i2v, t2v = one(with_cond, context), one(Problem(sizes=SIZES["tiny"]), context)
    batch = inputs(with_cond)
    got = i2v(**batch)
    cond = batch.pop("cond")
    assert torch.equal(got, t2v(**batch))
    assert torch.equal(got, i2v(**batch, cond=100 * cond))
    assert float(got.detach().abs().max()) > 0.01


@ranks()
def test_criterion_9_adaln_zero_starts_at_the_mean_square(context: ParallelContext) -> None:
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
def test_criterion_18_recomputation_changes_nothing(context: ParallelContext) -> None:
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
def test_trap_10_inputs_are_never_swallowed(context: ParallelContext) -> None:
    """Neither a misspelt input, nor one that the model has no use for, nor a missing one."""
    problem = Problem(sizes=SIZES["tiny"])
    chunk, batch = one(problem, context), inputs(problem)
    with pytest.raises(TypeError, match="unexpected keyword argument 'guidence'"):
        chunk(**batch, guidence=torch.ones(2))
    with pytest.raises(ConfigError, match="`guidance` was given, but .* without `guidance_embed`"):
        chunk(**batch, guidance=torch.ones(2))
    with pytest.raises(ConfigError, match="`cond` was given, but .* without `cond_embed`"):
        chunk(**batch, cond=torch.ones(2, 48, 20))
    full = Problem()
    needs, batch = one(full, context), inputs(full)
    del batch["cond"]
    with pytest.raises(ConfigError, match="`cond` is missing, but .* built with `cond_embed`"):
        needs(**batch)


@ranks()
def test_guidance_and_condition_have_an_effect(context: ParallelContext) -> None:
    problem = Problem()
    chunk, batch = one(problem, context), inputs(problem)
    torch.nn.init.normal_(chunk.embedding.cond_in.weight)  # type: ignore[union-attr]
    base = chunk(**batch)
    for name in ("cond", "guidance"):
        other = chunk(**{**batch, name: batch[name] + 1})
        assert float((other - base).detach().abs().max()) > 1e-3, name


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("img", lambda x: x[..., :-1], r"`img` has the shape \[2, 48, 15\], but .* \[2, 48, 16\]"),
        ("y_vec", lambda x: x[:1], r"`y_vec` has the shape \[1, 16\]"),
        ("txt_ids", lambda x: x[:, 1:], r"`txt` has the shape \[2, 8, 32\]"),
        ("img_ids", lambda x: x[0], r"`img_ids` has the shape \[48, 3\], but must be \[batch"),
        ("img", lambda x: None, "`img` is None, but every stage needs the ids, and the first all"),
        ("timesteps", lambda x: x.bfloat16(), "`timesteps` has the type torch.bfloat16, but"),
    ],
)
@ranks()
def test_shapes_that_do_not_fit_are_refused(
    context: ParallelContext, name: str, change: Any, message: str
) -> None:
    problem = Problem()
    batch = inputs(problem)
    batch[name] = change(batch[name])
    with pytest.raises(DataError, match=message):
        one(problem, context)(**batch)


@ranks()
def test_a_configuration_of_other_sizes_is_refused(context: ParallelContext) -> None:
    from tests.video.model.mmdit.problem import core_config

    config = core_config(Problem(), context)
    config.qk_layernorm = False
    with pytest.raises(ConfigError, match=r"`qk_layernorm` \(False\) must be True for this MMDiT"):
        MMDiT(config, I2V, MMDiTOptions(), context.pgs)


@ranks(cp=2, tp=4)
def test_heads_that_cannot_be_traded_are_refused(context: ParallelContext) -> None:
    with pytest.raises(ConfigError, match=r"a2a needs the attention heads .* \(1\) to be divis"):
        build(Problem(options=MMDiTOptions(cp_comm_type="a2a")), context)


@ranks()
def test_bfloat16_gives_nearly_the_velocity_of_float32(context: ParallelContext) -> None:
    problem = Problem()
    chunk, batch = one(problem, context), inputs(problem)
    want = chunk(**batch)
    got = chunk.bfloat16()(**batch)
    assert got.dtype == torch.bfloat16
    assert float((got.float() - want).detach().norm() / want.detach().norm()) < 0.03


@ranks()
def test_one_process_trains_as_plain_torch(context: ParallelContext) -> None:
    problem = Problem(mask="last frame")
    step = train_step(problem, context)
    loss, wanted = truth(problem, gathered_weights(step.chunks))
    assert step.loss == pytest.approx(loss, rel=1e-6)
    errors = gradient_errors(step, wanted)
    assert max(errors.values()) < 1e-5, errors


@ranks()
def test_adapters_are_refused(context: ParallelContext) -> None:
    """They would reduce on their own what the block reduces in common."""
    problem = Problem()
    for name in ("linear_fc1", "linear_proj"):
        chunk = one(problem, context)
        getattr(chunk.single_blocks["1"], name).lora = torch.nn.Identity()
        with pytest.raises(ConfigError, match="`--lora-rank` cannot be used with an MMDiT"):
            chunk(**inputs(problem))
