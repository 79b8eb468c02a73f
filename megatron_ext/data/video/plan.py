"""The clips of a run, step by step: which ones, of which shape, in sequences of which length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.data.video.geometry import Bucket
from megatron_ext.data.video.sampler import BucketSteps


@dataclass(frozen=True)
class Geometry:
    """The sequence of a clip of a bucket.

    Attributes:
        shape: of its latents, (c, t, h, w).
        num_text: text tokens, padding included.
        num_image: image tokens.
    """

    shape: tuple[int, int, int, int]
    num_text: int
    num_image: int

    @property
    def num_tokens(self) -> int:
        """Of the whole sequence."""
        return self.num_text + self.num_image


@dataclass(frozen=True)
class PlannedBatch:
    """A micro-batch before it is read.

    Attributes:
        bucket: of its clips.
        clips: their numbers in the dataset.
        samples: their numbers in the run.
    """

    bucket: Bucket
    clips: list[int]
    samples: range


class VideoPlan:
    """The micro-batches of each step, counted from the beginning of the run.

    Args:
        steps: the clips.
        geometries: of the buckets.
        identity: of all that decides which clips a step sees; a layout does not.
    """

    def __init__(
        self, steps: BucketSteps, geometries: Mapping[Bucket, Geometry], identity: str
    ) -> None:
        self.steps, self.geometries, self.identity = steps, geometries, identity
        self.steps_per_epoch = steps.steps_per_epoch

    def num_microbatches(self, step: int) -> int:
        """Of each data-parallel rank, the same in all steps."""
        return self.steps.num_microbatches

    def num_samples(self, step: int) -> int:
        """Clips of a step on all ranks together."""
        return self.steps.num_samples(step)

    def microbatches(self, step: int, rank: int, first_sample: int) -> list[PlannedBatch]:
        """Of one data-parallel rank.

        Args:
            step: counted from the beginning of the run.
            rank: data-parallel rank.
            first_sample: number in the run of the first clip of the step, over all ranks.
        """
        ranks = [self.steps.microbatches(step, other) for other in range(self.steps.num_ranks)]
        planned, first = [], first_sample
        for number in range(self.steps.num_microbatches):
            for other, of_rank in enumerate(ranks):
                bucket, clips = of_rank[number]
                if other == rank:
                    planned.append(PlannedBatch(bucket, clips, range(first, first + len(clips))))
                first += len(clips)
        return planned

    def sequences(self, step: int) -> list[Geometry]:
        """The sequence of every clip of a step, on all ranks."""
        return [
            self.geometries[bucket]
            for rank in range(self.steps.num_ranks)
            for bucket, clips in self.steps.microbatches(step, rank)
            for _ in clips
        ]
