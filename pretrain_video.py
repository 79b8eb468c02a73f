"""Pretrain a video model by flow matching, text-to-video and image-to-video.

Started by torchrun, or plainly: ``python pretrain_video.py --nproc-per-node 4 ...`` makes its own
ranks. ``python pretrain_video.py --help`` lists the flags.
"""

from __future__ import annotations

import sys

from megatron_ext.config.video_rules import VIDEO_DEFAULTS
from megatron_ext.training.pretrain import main
from megatron_ext.training.task import Task
from megatron_ext.training.video.data import build_video_datasets, prepare_video
from megatron_ext.training.video.samples import sample_while_training
from megatron_ext.training.video.source import video_source, video_step_size
from megatron_ext.training.video.task import boundary_shape, build_video_chunk, flow_forward_step

FLOW = Task(
    datasets=build_video_datasets,
    model_chunk=build_video_chunk,
    forward_step=flow_forward_step,
    boundary_shape=boundary_shape,
    source=video_source,
    step_size=video_step_size,
    after_step=sample_while_training,
    sample_name="videos",
    perplexity=False,
    preflight=prepare_video,
)

if __name__ == "__main__":
    sys.exit(main(FLOW, sys.argv[1:], defaults=VIDEO_DEFAULTS))
