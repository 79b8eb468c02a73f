"""Pretrain a video model by flow matching, or tune one on long videos (``--task streaming``).

Started by torchrun, or plainly: ``python pretrain_video.py --nproc-per-node 4 ...`` makes its own
ranks. ``python pretrain_video.py --help`` lists the flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.config.parser import read_words
from megatron_ext.config.run import RunConfig
from megatron_ext.train.main import main
from megatron_ext.train.task import Task
from megatron_ext.video.config.rules import STREAMING_DEFAULTS, VIDEO_DEFAULTS, VIDEO_DIT_DEFAULTS
from megatron_ext.video.data.setup import build_video_datasets, planned_clips, prepare_video
from megatron_ext.video.data.step_loader import video_source, video_step_stats
from megatron_ext.video.sampling.samples import SampleWhileTraining
from megatron_ext.video.step import (
    boundary_shape,
    build_dit_chunk,
    build_video_chunk,
    dit_boundary_shape,
    dit_forward_step,
    flow_forward_step,
)
from megatron_ext.video.streaming.task import STREAMING

FLOW = Task(
    datasets=build_video_datasets,
    model_chunk=build_video_chunk,
    forward_step=flow_forward_step,
    boundary_shape=boundary_shape,
    source=video_source,
    step_stats=video_step_stats,
    callbacks=(SampleWhileTraining,),
    sample_name="videos",
    perplexity=False,
    preflight=prepare_video,
    clips=planned_clips,
)

FLOW_OF_DIT = dataclasses.replace(
    FLOW,
    model_chunk=build_dit_chunk,
    forward_step=dit_forward_step,
    boundary_shape=dit_boundary_shape,
)


def task_of(config: RunConfig) -> Task:
    """What the flags ask for."""
    if config.video.streams:
        return STREAMING
    return FLOW_OF_DIT if config.video.uses_dit else FLOW


def defaults_of(argv: Sequence[str]) -> Mapping[str, Any]:
    """What a run of the task starts from."""
    asked = read_words(argv).values.get("video", {})
    if asked.get("task") == "streaming":
        return STREAMING_DEFAULTS
    return VIDEO_DEFAULTS if asked.get("video_model", "mmdit") == "mmdit" else VIDEO_DIT_DEFAULTS


if __name__ == "__main__":
    run_program(lambda argv: main(task_of, argv, defaults=defaults_of(argv)))
