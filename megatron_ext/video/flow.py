"""The parts of the flow-matching task that are the same for all networks.

The task in `video.task` names these functions, and they are imported when a run starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.losses.contract import LossFunction, StepCounts
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.planning.network import Case
from megatron_ext.train.run import Run
from megatron_ext.video.data.setup import planned_clips
from megatron_ext.video.model.chunk import VideoChunk
from megatron_ext.video.networks.lookup import network_of
from megatron_ext.video.sampling.samples import ClipSampler, SampleWhileTraining
from megatron_ext.video.step import FlowMicrobatch


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


def clip_samples(run: Run) -> SampleWhileTraining | None:
    """Return the callback that samples clips, or None without ``--sample-interval``."""
    return SampleWhileTraining.of_run(run, ClipSampler)
