"""The clips of a video run, step by step, as micro-batches of this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ext.data.loader import BatchSource
from megatron_ext.data.video.plan import Geometry
from megatron_ext.data.video.step_loader import VideoLoader
from megatron_ext.models.causal_video.flops import flops_of_frames
from megatron_ext.models.mmdit.flops import flops_of_clip
from megatron_ext.training.video.data import VideoSplit
from megatron_ext.training.video.dit import VideoDiTMaker, dit_options
from megatron_ext.training.video.microbatch import FlowMaker, FlowMicrobatch
from megatron_ext.training.video.widths import patch_size_of, sequence_multiple
from megatron_ext.training.window import StepSize

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.data.tokenizers import Tokenizer
    from megatron_ext.training.setup import Run

EVALUATION_SEED = 1 << 32
"""Added to the seed, so that validation clips never share their noise with training clips."""


class VideoSource(BatchSource):
    """The steps of one split on this rank, from a step on.

    Args:
        run: the run.
        split: the data.
        first_step: of the plan.
        consumed_samples: clips of all steps before, by which random decisions are numbered.
        training: else every pass makes the same decisions about a clip.
    """

    def __init__(
        self,
        run: Run,
        split: VideoSplit,
        *,
        first_step: int,
        consumed_samples: int,
        training: bool,
    ) -> None:
        self.video_plan = split.plan
        super().__init__(None, len(split.clips), split.plan, first_step)  # type: ignore[arg-type]
        self._dp_rank, self._training = run.context.dp_rank, training
        self._consumed = consumed_samples
        config = run.config
        self._clips = VideoLoader(
            split.clips,
            split.plan,
            run.context,
            run.device,
            patch=patch_size_of(config),
            multiple=sequence_multiple(config),
            num_workers=config.data.num_workers,
            first_step=first_step,
        )
        seed = config.training.seed + (0 if training else EVALUATION_SEED)
        maker = VideoDiTMaker if config.video.uses_dit else FlowMaker
        self._make = maker(config, run.context, self._clips.null, seed)

    @property
    def coming(self) -> int:
        """The step that comes next, counted from the beginning of the run."""
        return self._coming

    def next_step(self, num_microbatches: int) -> list[FlowMicrobatch]:
        """Micro-batches of the next step."""
        planned = self.video_plan.microbatches(self._coming, self._dp_rank, self._consumed)
        self._consumed += self.video_plan.num_samples(self._coming)
        self._coming += 1
        return [
            self._make(self._clips.next(), batch.samples if self._training else batch.clips)
            for batch in planned
        ]


def video_source(
    run: Run, dataset: Any, tokenizer: Tokenizer, consumed_samples: int, full_epoch: bool
) -> VideoSource:
    """See `Task.source`. Validation begins anew each time, with the same noise."""
    return VideoSource(
        run,
        dataset,
        first_step=0 if full_epoch else run.progress.iteration,
        consumed_samples=consumed_samples,
        training=not full_epoch,
    )


def video_step_size(run: Run, num_microbatches: int) -> StepSize:
    """Clips, tokens and floating-point operations of the coming step; see `Task.step_size`."""
    source = run.train_source
    assert isinstance(source, VideoSource)
    sequences = source.video_plan.sequences(source.coming)
    return StepSize(
        samples=len(sequences),
        tokens=sum(sequence.num_tokens for sequence in sequences),
        flops=sum(_flops(run.config, sequence) for sequence in sequences),
    )


def _flops(config: RunConfig, sequence: Geometry) -> float:
    """Of one clip, forward and backward."""
    if not config.video.uses_dit:
        return flops_of_clip(
            config.mmdit.sizes(config.model), sequence.num_text, sequence.num_image
        )
    num_frames = sequence.shape[1]
    return flops_of_frames(
        config.video_dit.sizes,
        dit_options(config).window,
        num_text=sequence.num_text,
        num_frames=num_frames,
        tokens_per_frame=sequence.num_image // num_frames,
    )
