"""The tasks of pretrain_video.py: flow matching with each network, and streaming long-tuning."""

from __future__ import annotations

import dataclasses

from megatron_ext.config.run import RunConfig
from megatron_ext.train.task import Task, TaskChoice
from megatron_ext.video.config.rules import (
    FLOW_LEFT_OUT,
    SECTIONS,
    VIDEO_DEFAULTS,
    VIDEO_DIT_DEFAULTS,
    flow_rules,
    resolve_flow,
)
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.stored import stored_video_model
from megatron_ext.video.cost.flow import FLOW_COST
from megatron_ext.video.data.setup import build_video_datasets, prepare_video
from megatron_ext.video.data.step_loader import video_source, video_step_stats
from megatron_ext.video.model.mmdit.flow import MMDIT
from megatron_ext.video.model.wan.flow import WAN
from megatron_ext.video.sampling.samples import SampleWhileTraining
from megatron_ext.video.streaming.task import STREAMING

FLOW = Task(
    sections=SECTIONS,
    left_out=FLOW_LEFT_OUT,
    defaults=VIDEO_DEFAULTS,
    resolve=resolve_flow,
    rules=flow_rules,
    stored_model=stored_video_model,
    preflight=prepare_video,
    datasets=build_video_datasets,
    source=video_source,
    model_chunk=MMDIT.build_chunk,
    boundary_shape=MMDIT.boundary_shape,
    forward_step=MMDIT.forward_step,
    step_stats=video_step_stats,
    callbacks=(SampleWhileTraining,),
    cost=FLOW_COST,
    sample_name="videos",
)

FLOW_OF_DIT = dataclasses.replace(
    FLOW,
    defaults=VIDEO_DIT_DEFAULTS,
    model_chunk=WAN.build_chunk,
    forward_step=WAN.forward_step,
    boundary_shape=WAN.boundary_shape,
)


def task_of(config: RunConfig) -> Task:
    """Return the task that the flags ask for."""
    video = config.section(VideoConfig)
    if video.streams:
        return STREAMING
    return FLOW_OF_DIT if video.uses_dit else FLOW


VIDEO = TaskChoice((FLOW, FLOW_OF_DIT, STREAMING), task_of)
