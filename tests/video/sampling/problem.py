"""A tiny MMDiT on any layout, ready to be sampled from."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.forward import forward_engine
from megatron_ext.video.config.encoding import CodecConfig, TextEncoderConfig
from megatron_ext.video.config.run import FlowConfig, SampleConfig
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.conditions import Text
from megatron_ext.video.data.text_encoders import build_text_encoder
from megatron_ext.video.networks.joint import JointVelocity
from megatron_ext.video.networks.mmdit.config import SIZES
from megatron_ext.video.sampling.flow import ClipsInProgress, Velocity
from megatron_ext.video.sampling.groups import SampleShape
from megatron_ext.video.sampling.guidance import Guidance
from megatron_ext.video.sampling.requests import ClipRequest
from megatron_ext.video.sampling.solvers import Schedule
from tests.video.networks.harness import build, wrapped
from tests.video.networks.mmdit.problem import Problem

SHAPE = SampleShape(num_frames=9, height=32, width=32, fps=8)
CODEC = build_codec(CodecConfig(codec_spatial=4, codec_temporal=4, codec_channels=4))
ENCODER = build_text_encoder(TextEncoderConfig(text_length=8, text_width=32, pooled_width=16))
FLOW = FlowConfig()
SEED = 11
SAMPLING = SampleConfig(
    sample_steps=3, sample_text_scale=2.0, sample_image_scale=1.5, sample_seed=SEED,
    sample_batch_size=2,
)  # fmt: skip
LATENT = (3, 8, 8)
NUM_IMAGE, NUM_TEXT = 48, 8
I2V = dataclasses.replace(SIZES["tiny"], cond_embed=True)


def sampled(
    velocity: Velocity, text: Text, null: Text, noise: Tensor, *, schedule: Schedule, **more: Any
) -> Tensor:
    """Sample a batch of clips from their noise to their latents."""
    shape = noise.size(2), noise.size(3), noise.size(4)
    clips = ClipsInProgress(
        text, null, noise, patch_size=2, solver=schedule.solver(shape, 2),
        guidance=Guidance(schedule.sampling), **more,
    )  # fmt: skip
    clips.advance(velocity)
    return clips.latents()


def velocity_on(
    context: ParallelContext, sizes: Any = I2V, *, guidance: float | None = None,
    bf16: bool = False, **settings: Any,
) -> JointVelocity:  # fmt: skip
    """Return the velocity of one model on these ranks, with a condition branch that counts."""
    config, chunks = build(Problem(sizes=sizes, **settings), context)
    for chunk in chunks:
        move_off_zero(chunk)
    if bf16:
        config.bf16, config.pipeline_dtype = True, torch.bfloat16
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp = wrapped(chunks, config, context)
    engine = forward_engine(ddp, config, context)
    return JointVelocity(engine, ddp, context, patch_size=2, guidance=guidance)


def move_off_zero(chunk: torch.nn.Module) -> None:
    """Set the zero-initialised branch of the condition, the same on all ranks that hold it."""
    for name, parameter in chunk.named_parameters():
        if "cond_in" in name:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def requests_with(reference: Path | None, count: int = 3) -> list[ClipRequest]:
    texts = ["a red square moves left", "a blue disc", "a green ring moves up", "nothing", "two"]
    asked = [ClipRequest(text) for text in texts[:count]]
    if reference is not None:
        asked[1] = ClipRequest(texts[1], str(reference), "i2v_head")
    return asked
