"""The tasks of pretrain_video.py: flow matching with any network, and streaming long-tuning.

A program imports this file to know its flags, so the parts that need torch or megatron-core are
named by `later`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.task_cost import TaskCost
from megatron_ext.train.task import Task, TaskChoice, later
from megatron_ext.video.config.rules import (
    SECTIONS,
    UNUSED_IN_FLOW,
    VIDEO_DEFAULTS,
    flow_rules,
    resolve_flow,
)
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.stored import stored_video_model
from megatron_ext.video.config.weights import initial_weights, model_of_weights
from megatron_ext.video.inputs import video_inputs
from megatron_ext.video.networks.lookup import chosen, network_of
from megatron_ext.video.streaming.task import STREAMING

DATA = "megatron_ext.video.data.setup"
PARTS = "megatron_ext.video.flow"

FLOW = Task(
    sections=SECTIONS,
    inapplicable=UNUSED_IN_FLOW,
    defaults=VIDEO_DEFAULTS,
    resolve=resolve_flow,
    rules=flow_rules,
    stored_model=stored_video_model,
    described_model=model_of_weights,
    initial_weights=initial_weights,
    preflight=later(f"{DATA}:prepare_video"),
    inputs=video_inputs,
    datasets=later(f"{DATA}:build_video_datasets"),
    source=later(f"{DATA}:VideoSource"),
    model_chunk=later(f"{PARTS}:build_chunk"),
    boundary_shape=later(f"{PARTS}:boundary_shape"),
    forward_step=later(f"{PARTS}:forward_step"),
    step_stats=later(f"{DATA}:video_step_stats"),
    callbacks=(later(f"{PARTS}:clip_samples"),),
    cost=TaskCost(
        cases=later(f"{PARTS}:cases"),
        modes=("none", "full"),
        recompute=lambda config, mode: network_of(config).recomputing(mode),
    ),
    sample_name="videos",
)


def task_of(config: RunConfig) -> Task:
    """Return the task of ``--task``: streaming, or flow matching with the network's defaults."""
    if config.section(VideoConfig).streams:
        return STREAMING
    return _flow_with_defaults(tuple(chosen(config).flow_defaults(config).items()))


@functools.cache
def _flow_with_defaults(defaults: tuple[tuple[str, Any], ...]) -> Task:
    if not defaults:
        return FLOW
    return dataclasses.replace(FLOW, defaults={**VIDEO_DEFAULTS, **dict(defaults)})


VIDEO = TaskChoice((FLOW, STREAMING), task_of)
