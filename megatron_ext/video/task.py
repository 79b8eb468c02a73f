"""The tasks of pretrain_video.py: flow matching with any network, and streaming long-tuning."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from functools import partial

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.losses.contract import LossFunction, StepCounts
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.planning.network import Case, TaskCost
from megatron_ext.train.task import Task, TaskChoice
from megatron_ext.video.config.rules import (
    SECTIONS,
    UNUSED_IN_FLOW,
    VIDEO_DEFAULTS,
    flow_rules,
    resolve_flow,
)
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.stored import stored_video_model
from megatron_ext.video.data.setup import (
    VideoSource,
    build_video_datasets,
    planned_clips,
    prepare_video,
    video_inputs,
    video_step_stats,
)
from megatron_ext.video.model.chunk import VideoChunk
from megatron_ext.video.networks.lookup import chosen, network_of
from megatron_ext.video.networks.network import VideoNetwork
from megatron_ext.video.sampling.samples import ClipSampler, SampleWhileTraining
from megatron_ext.video.step import FlowMicrobatch
from megatron_ext.video.streaming.task import STREAMING


def cases(config: RunConfig) -> Sequence[Case]:
    """Return the cost model's `Case` of each bucket (size of clips) that some step uses.

    This opens the training data, except with ``--dry-run-shape``.
    """
    return [
        Case(
            network=network_of(config).planned(clip),
            name=clip.name,
            share=clip.share,
            columns={
                "clips at a time": str(clip.micro_batch_size),
                "text + image tokens": f"{clip.num_text} + {clip.num_image}",
            },
        )
        for clip in planned_clips(config)
    ]


def build_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    *,
    vp_stage: int | None = None,
    **stage: bool,
) -> VideoChunk:
    """Build one pipeline chunk of the run's network on this rank.

    ``vp_stage`` is the index of the chunk on this rank; None if the rank has only one. ``stage`` is
    unused, since ``context`` tells the pipeline stage.
    """
    network = network_of(config)
    return network.chunk.build(
        network.sizes, network.options, transformer_config, context, vp_stage=vp_stage
    )


def forward_step(
    config: RunConfig, batch: FlowMicrobatch, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    """Run one pipeline chunk on one micro-batch; return its output and a loss function of it.

    ``counts`` are the numbers of targets in the whole step, by which the loss is weighted. They are
    None in evaluation, and on ranks that do not have the last pipeline stage.
    """
    return network_of(config).forward_step(batch, model, counts)


def boundary_shape(batch: FlowMicrobatch, chunk: torch.nn.Module) -> list[int]:
    """Return the shape of the tensor that pipeline stages send each other for a micro-batch."""
    shape: list[int] = get_attr_wrapped_model(chunk, "boundary_shape")(**batch.boundary_inputs)
    return shape


FLOW = Task(
    sections=SECTIONS,
    inapplicable=UNUSED_IN_FLOW,
    defaults=VIDEO_DEFAULTS,
    resolve=resolve_flow,
    rules=flow_rules,
    stored_model=stored_video_model,
    preflight=prepare_video,
    inputs=video_inputs,
    datasets=build_video_datasets,
    source=VideoSource,
    model_chunk=build_chunk,
    boundary_shape=boundary_shape,
    forward_step=forward_step,
    step_stats=video_step_stats,
    callbacks=(partial(SampleWhileTraining.of_run, build=ClipSampler),),
    cost=TaskCost(
        cases=cases,
        modes=("none", "full"),
        recompute=lambda config, mode: network_of(config).recomputing(mode),
    ),
    sample_name="videos",
)


def task_of(config: RunConfig) -> Task:
    """Return the task of ``--task``: streaming, or flow matching with the network's defaults."""
    if config.section(VideoConfig).streams:
        return STREAMING
    return _flow_with_defaults(chosen(config))


@functools.cache
def _flow_with_defaults(network: VideoNetwork) -> Task:
    if not network.flow_defaults:
        return FLOW
    return dataclasses.replace(FLOW, defaults={**VIDEO_DEFAULTS, **network.flow_defaults})


VIDEO = TaskChoice((FLOW, STREAMING), task_of)
