"""Defines `STREAMING`, the task that trains a generator of long videos (``--task streaming``)."""

from __future__ import annotations

from megatron_ext.planning.task_cost import TaskCost
from megatron_ext.train.task import Task, later, no_datasets
from megatron_ext.video.config.rules import (
    SECTIONS,
    STREAMING_DEFAULTS,
    UNUSED_IN_STREAMING,
    resolve_streaming,
    streaming_rules,
)
from megatron_ext.video.config.stored import stored_video_model
from megatron_ext.video.config.weights import initial_weights, model_of_weights

HERE = "megatron_ext.video.streaming"

STREAMING = Task(
    sections=SECTIONS,
    inapplicable=UNUSED_IN_STREAMING,
    defaults=STREAMING_DEFAULTS,
    resolve=resolve_streaming,
    rules=streaming_rules,
    stored_model=stored_video_model,
    described_model=model_of_weights,
    initial_weights=initial_weights,
    datasets=no_datasets,
    model_chunk=later(f"{HERE}.networks:build_network"),
    source=later(f"{HERE}.run:no_batches"),
    step_stats=later(f"{HERE}.run:streaming_step_stats"),
    callbacks=(later(f"{HERE}.run:long_video_samples"),),
    sample_name="chunks",
    preflight=later(f"{HERE}.prepare:prepare_streaming"),
    inputs=later(f"{HERE}.prepare:streaming_inputs"),
    step_runner=later(f"{HERE}.step:StreamingRunner"),
    cost=TaskCost(report=later(f"{HERE}.cost:report")),
)
