"""The velocity of one model on many ranks: whole, exact, and without traces in the training."""

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.runtime import PipelineEngine
from megatron_ext.video.data.conditions import condition
from megatron_ext.video.model.tokens import pack
from megatron_ext.video.networks.mmdit.config import SIZES
from megatron_ext.video.sampling.flow import References
from megatron_ext.video.sampling.velocity import ParallelVelocity
from tests.ranks import ranks
from tests.video.networks.harness import gathered_weights, wrapped
from tests.video.networks.mmdit.problem import I2V as DISTILLED
from tests.video.networks.mmdit.problem import Problem
from tests.video.sampling.problem import I2V, LATENT, NUM_IMAGE, velocity_on


def inputs_of(sizes: Any, num_text: int = 8, batch: int = 2) -> list[Any]:
    """Return random tokens, times, text, pooled text, and references of the last two frames."""
    generator = torch.Generator().manual_seed(3)
    text, pooled, image = (num_text, sizes.text_width), (sizes.pooled_width,), NUM_IMAGE
    shapes = (image, sizes.token_width), (), text, pooled, (sizes.token_width // 4, *LATENT)
    x, t, *rest, latents = (torch.randn(batch, *shape, generator=generator) for shape in shapes)
    masks = torch.tensor([False, True, True]).expand(batch, -1)
    return [x, t.sigmoid(), *rest, References(latents, masks)]


def check_against_plain(
    context: ParallelContext, velocity: ParallelVelocity, sizes: Any, num_text: int, padded: int
) -> None:
    """Compare with plain torch, where text rows up to ``padded`` repeat the last one."""
    x, t, text, pooled, given = inputs_of(sizes, num_text)
    found = velocity.of_shape(LATENT)(x, t, text, pooled, given)
    cond = pack(condition(given.latents, given.masks), 2)
    chunks = [chunk.module for chunk in velocity.chunks]
    plain = Problem(sizes=sizes).plain_model(gathered_weights(chunks))
    longer = torch.cat([text, text[:, -1:].expand(-1, padded - num_text, -1)], dim=1)
    with torch.no_grad():
        ids = torch.cartesian_prod(*(torch.arange(k) for k in (3, 4, 4))).expand(2, -1, -1)
        none = torch.zeros(2, padded, 3, dtype=torch.int64)
        want = plain(
            x.double(), ids, longer.double(), none, t, pooled.double(),
            guidance=torch.full((2,), 4.0) if sizes.guidance_embed else None,
            cond=cond.double() if sizes.cond_embed else None,
        )  # fmt: skip
    assert found.dtype == torch.float32 and found.shape == x.shape
    assert float((found - want).norm() / want.norm()) < 1e-5


@ranks(cp=2)
def test_a_rank_without_image_tokens_takes_part(context: ParallelContext) -> None:
    """Let 64 of 112 tokens be text, of which the first rank holds 56."""
    velocity = velocity_on(context)
    own = velocity.chunks[0].module.image_tokens(64, NUM_IMAGE)
    assert (own.stop - own.start == 0) == (context.cp_rank == 0)
    check_against_plain(context, velocity, I2V, 64, 64)


@ranks(tp=2, cp=2)
def test_text_is_padded_for_context_and_sequence_parallelism(context: ParallelContext) -> None:
    check_against_plain(context, velocity_on(context, sequence_parallel=True), I2V, 5, 8)
    check_against_plain(context, velocity_on(context), I2V, 5, 6)


@ranks(pp=2)
def test_a_distilled_model_is_given_its_guidance(context: ParallelContext) -> None:
    velocity = velocity_on(context, DISTILLED, guidance=4.0)
    check_against_plain(context, velocity, DISTILLED, 8, 8)
    check_against_plain(context, velocity_on(context, SIZES["tiny"]), SIZES["tiny"], 8, 8)


@ranks(tp=2, pp=2)
def test_all_ranks_get_the_same_in_16_bits(context: ParallelContext) -> None:
    """Keep times in float32, since the model refuses others."""
    given = inputs_of(I2V)
    exact = velocity_on(context).of_shape(LATENT)(*given)
    found = velocity_on(context, bf16=True).of_shape(LATENT)(*given)
    assert found.dtype == torch.float32
    assert 1e-4 < float((found - exact).norm() / exact.norm()) < 0.05
    everyone = [torch.empty_like(found) for _ in range(4)]
    torch.distributed.all_gather(everyone, found)
    assert all(torch.equal(found, other) for other in everyone)


@ranks(pp=2)
def test_training_is_left_as_it_was(context: ParallelContext) -> None:
    velocity = velocity_on(context)
    for chunk in velocity.chunks:
        chunk.train()
    frozen = next(m for c in velocity.chunks for m in c.modules() if isinstance(m, torch.nn.Linear))
    frozen.eval()
    modes: list[bool] = []
    first = velocity.chunks[0]
    hook = first.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    before = torch.get_rng_state()
    found = velocity.of_shape(LATENT)(*inputs_of(I2V))
    hook.remove()
    assert modes == [False] and not found.requires_grad
    assert torch.equal(torch.get_rng_state(), before)
    for chunk in velocity.chunks:
        assert all(m.training == (m is not frozen) for m in chunk.modules())
        assert all(p.grad is None and not p.main_grad.any() for p in chunk.parameters())


@ranks(pp=2)
def test_inputs_that_do_not_fit_are_refused_on_all_ranks(context: ParallelContext) -> None:
    velocity = velocity_on(context)
    x, t, text, pooled, given = inputs_of(I2V)
    with pytest.raises(DataError, match="must be divisible by the patch size"):
        velocity.of_shape((3, 8, 7))
    with pytest.raises(DataError, match=r"`y_vec` has the shape \[2, 15\]"):
        velocity.of_shape(LATENT)(x, t, text, pooled[:, 1:], given)


class OwnModel(MegatronModule):
    """A user's model of two stages that scale; the first joins inputs, the second drops text."""

    def __init__(self, config: StepTransformerConfig, stage: int, *, joins_text: bool) -> None:
        super().__init__(config=config)
        self.stage, self.joins_text, self.entering = stage, joins_text, None
        self.scale = torch.nn.Parameter(torch.tensor(2.0 + stage))

    def set_input_tensor(self, tensors: Any) -> None:
        self.entering = tensors[0]

    def boundary_shape(self, num_text: int, num_image: int, micro_batch_size: int) -> list[int]:
        return [num_image, micro_batch_size, 16]

    def forward(
        self, *, img: Tensor, img_ids: Tensor, txt: Tensor, txt_ids: Tensor, timesteps: Tensor,
        y_vec: Tensor,
    ) -> Tensor:  # fmt: skip
        if self.stage == 0:
            of_text = txt.mean(dim=(1, 2)) + y_vec.mean(dim=1) + timesteps
            x = img + of_text[:, None, None] + img_ids.sum(-1, keepdim=True)
            return (self.scale * x).transpose(0, 1).contiguous()
        assert self.entering is not None
        out = (self.scale * self.entering).transpose(0, 1)
        return torch.cat([txt, out], dim=1) if self.joins_text else out


class Incomplete(MegatronModule):
    """A model without the shape of what stages pass on."""


@ranks(pp=2)
def test_a_users_own_model_is_sampled_from(context: ParallelContext) -> None:
    velocity = own_velocity(context)
    assert not velocity.takes_references
    sizes = dataclasses.replace(I2V, text_width=16)
    x, t, text, pooled, given = inputs_of(sizes)
    of_text = text.mean(dim=(1, 2)) + pooled.mean(dim=1) + t
    ids = torch.cartesian_prod(*(torch.arange(k) for k in (3, 4, 4))).sum(-1)
    want = 6 * (x + of_text[:, None, None] + ids[:, None])
    found = velocity.of_shape(LATENT)(x, t, text, pooled, given)
    assert torch.allclose(found, want, rtol=1e-6, atol=1e-6)


@ranks(cp=2)
def test_context_parallelism_needs_the_slices_of_the_model(context: ParallelContext) -> None:
    with pytest.raises(ConfigError, match=r"`--context-parallel-size` \(2\) needs a model with"):
        own_velocity(context)


def own_velocity(context: ParallelContext, *, joins_text: bool = False) -> ParallelVelocity:
    config = StepTransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=1, pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=context.pgs.pp.size(),
        context_parallel_size=context.pgs.cp.size(),
    )  # fmt: skip
    chunks = wrapped([OwnModel(config, context.pp_rank, joins_text=joins_text)], config, context)
    engine = PipelineEngine("1f1b", chunks, config, context)
    return ParallelVelocity(engine, chunks, context, patch_size=2)


@ranks()
def test_models_without_a_method_or_of_another_shape_are_refused(context: ParallelContext) -> None:
    engine = own_velocity(context).engine
    with pytest.raises(ConfigError, match="model Incomplete must have a method `boundary_shape"):
        ParallelVelocity(engine, [Incomplete(engine.transformer_config)], context, patch_size=2)
    velocity = own_velocity(context, joins_text=True)
    velocity.chunks[0].module.stage = 1
    velocity.chunks[0].module.set_input_tensor = lambda _: setattr(
        velocity.chunks[0].module, "entering", torch.zeros(NUM_IMAGE, 2, 16)
    )
    x, t, text, pooled, given = inputs_of(dataclasses.replace(I2V, text_width=16))
    with pytest.raises(DataError, match=r"output has the shape \[2, 56, 16\], but must be"):
        velocity.of_shape(LATENT)(x, t, text, pooled, given)
