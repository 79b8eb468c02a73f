"""Plans which clips each rank gets in each step of a run, and how many tokens each clip has.

Data-parallel ranks wait for one another in every step. Therefore all clips of a step come from one
bucket, if every bucket has enough clips for a step; otherwise buckets are mixed within steps, so
that none is left out. The order is a function of ``(seed, epoch, step)``, so a run can resume from
its step alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.samplers import shuffled
from megatron_ext.errors import DataError
from megatron_ext.video.data.geometry import Bucket


@dataclass(frozen=True)
class Members:
    """The clips of one bucket, as indices into the dataset, and its micro-batch size on one rank.

    Attributes:
        clips: the clips that the first epoch takes.
        shares: for each dataset of a blend: its clips in this bucket, and how many clips an epoch
            takes from them; some are repeated if these are more than there are. Empty without a
            blend: each epoch takes all ``clips`` once.
    """

    clips: Sequence[int]
    micro_batch_size: int
    shares: Sequence[tuple[Sequence[int], int]] = ()

    @classmethod
    def of_shares(
        cls, shares: Sequence[tuple[Sequence[int], int]], micro_batch_size: int
    ) -> Members:
        """Return the clips of one bucket for a weighted blend of datasets.

        ``shares`` has, for each dataset: the indices of its clips in this bucket, and how many
        clips an epoch takes from them.
        """
        clips = cls((), micro_batch_size, shares).of_epoch(0)
        return cls(clips.tolist(), micro_batch_size, shares)

    def of_epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the indices of the clips that an epoch takes, equally many in every epoch.

        If `shares` is empty, these are all clips. Otherwise an epoch goes on, in each dataset,
        where the previous one stopped; after the last clip it begins again at the first.
        """
        if not self.shares:
            return np.asarray(self.clips, np.int64)
        taken = [np.zeros(0, np.int64)]
        for clips, count in self.shares:
            # Shuffle the set first, since neighbours in a list are often alike.
            mixed = np.asarray(clips, np.int64)[shuffled(len(clips), 0, 0, 0)]
            taken.append(mixed[(epoch * count + np.arange(count)) % max(len(clips), 1)])
        return np.concatenate(taken)


def must_mix(buckets: Mapping[Bucket, Members], num_microbatches: int) -> bool:
    """Tell whether any bucket has enough clips for a micro-batch, but too few for a whole step.

    Then buckets must be mixed within steps, or such a bucket would never be trained. A step has
    ``num_microbatches`` micro-batches on all ranks together.
    """
    filled = (len(m.clips) // m.micro_batch_size for m in buckets.values())
    return any(0 < count < num_microbatches for count in filled)


@dataclass
class BucketSteps:
    """The order of clips: which micro-batches each data-parallel rank gets in each step.

    In each epoch the clips of every bucket are shuffled and cut into units, which are shuffled too.
    A unit has the clips of a whole step on all ranks or, with ``mixed``, of one micro-batch.

    Attributes:
        seed: seed of the shuffling; None for no shuffling.
        mixed: whether a step may have clips of several buckets; ranks then take units in turn.
        whole: whether all clips are taken. The last unit of a bucket may then have fewer clips, and
            with ``mixed`` the last step gets micro-batches without clips; see `filled`. Otherwise
            the last clips of a bucket, which fill no unit, are left out, in each epoch other ones.
        name: name of the data, for errors.

    Raises:
        DataError: the clips do not fill a step.
    """

    buckets: Mapping[Bucket, Members]
    num_ranks: int
    num_microbatches: int
    seed: int | None
    mixed: bool = False
    whole: bool = False
    name: str = "The data"

    def __post_init__(self) -> None:
        self._per_step = self.num_ranks * self.num_microbatches
        units = sum(self._num_units(members) for members in self.buckets.values())
        self.steps_per_epoch = self._share(units, self._per_step) if self.mixed else units
        if self.whole and not units:
            raise DataError(f"{self.name} holds no clips; give one at least, or leave the set out.")
        if not self.steps_per_epoch:
            counts = ", ".join(f"{b}: {len(m.clips)}" for b, m in self.buckets.items())
            raise DataError(
                f"{self.name} has too few clips for one step ({counts or 'none'}): a step takes "
                f"micro-batch size × {self.num_ranks} ranks × {self.num_microbatches} micro-batches"
                "; give more clips, fewer buckets or smaller batches."
            )
        self._epoch = -1
        self._order = list[tuple[Bucket, list[int]]]()

    def _unit(self, members: Members) -> int:
        """Return the number of clips of a unit: a step or, with ``mixed``, a micro-batch."""
        return members.micro_batch_size * (1 if self.mixed else self._per_step)

    def _share(self, count: int, size: int) -> int:
        """Divide a number of clips or units by ``size``, rounding down or, with ``whole``, up."""
        return -(-count // size) if self.whole else count // size

    def _num_units(self, members: Members) -> int:
        return self._share(len(members.clips), self._unit(members))

    @property
    def left_out(self) -> dict[Bucket, int]:
        """Return the number of clips that an epoch leaves out, by bucket."""
        if self.whole:
            return dict.fromkeys(self.buckets, 0)
        return {b: len(m.clips) % self._unit(m) for b, m in self.buckets.items()}

    @property
    def never_taken(self) -> dict[Bucket, int]:
        """Return, for each bucket with too few clips for one unit, how many a unit needs."""
        return {b: self._unit(m) for b, m in self.buckets.items() if not self._num_units(m)}

    def filled(self, bucket: Bucket, clips: Sequence[int]) -> list[int]:
        """Return the clips of a micro-batch, completed to the micro-batch size of ``bucket``.

        The first clip of the bucket takes the place of each missing clip.
        """
        members = self.buckets[bucket]
        missing = members.micro_batch_size - len(clips)
        return [*clips, *[members.clips[0]] * missing]

    def microbatches(self, step: int, rank: int) -> list[tuple[Bucket, list[int]]]:
        """Return (bucket, numbers of clips) of each micro-batch of a data-parallel rank in a step.

        ``step`` counts from the beginning of the first epoch.
        """
        epoch, step = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = self._shuffled_units(epoch)
            self._epoch = epoch
        if self.mixed:
            first = step * self._per_step + rank
            return self._order[first : first + self._per_step : self.num_ranks]
        bucket, clips = self._order[step]
        size = self.buckets[bucket].micro_batch_size
        starts = ((micro * self.num_ranks + rank) * size for micro in range(self.num_microbatches))
        return [(bucket, clips[start : start + size]) for start in starts]

    def num_samples(self, step: int) -> int:
        """Return the number of clips of a step, over all ranks."""
        ranks = (self.microbatches(step, rank) for rank in range(self.num_ranks))
        return sum(len(clips) for of_rank in ranks for _, clips in of_rank)

    def _shuffled_units(self, epoch: int) -> list[tuple[Bucket, list[int]]]:
        units = list[tuple[Bucket, list[int]]]()
        # Sort the buckets, so that the result does not depend on the order of the mapping.
        for i, (bucket, members) in enumerate(sorted(self.buckets.items(), key=lambda b: b[0])):
            size = self._unit(members)
            clips = members.of_epoch(epoch)
            clips = clips[self._shuffled(len(clips), epoch, 1 + i)]
            starts = range(0, self._num_units(members) * size, size)
            units += [(bucket, clips[start : start + size].tolist()) for start in starts]
        units = [units[i] for i in self._shuffled(len(units), epoch, 0).tolist()]
        # Complete the last step with micro-batches without clips.
        if self.mixed and self.whole:
            units += [(units[-1][0], [])] * (-len(units) % self._per_step)
        return units

    def _shuffled(self, count: int, epoch: int, purpose: int) -> NDArray[np.int64]:
        seed = self.seed
        return np.arange(count) if seed is None else shuffled(count, seed, epoch, purpose)


@dataclass(frozen=True)
class Geometry:
    """The size of the token sequence of each clip of a bucket.

    Attributes:
        shape: (c, t, h, w) of the clip's latents.
        num_text: number of text tokens, including padding.
        num_image: number of image tokens, which are patches of the latents.
    """

    shape: tuple[int, int, int, int]
    num_text: int
    num_image: int

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the whole sequence."""
        return self.num_text + self.num_image


class VideoPlan:
    """The micro-batches of each step of a run; steps are counted from the beginning of the run.

    Args:
        steps: the order of the clips.
        geometries: the size of the token sequences, by bucket.
        identity: hash of the data and settings, without the parallel layout, that determine the
            clips of each step. Checkpoints store it, so that a resumed run notices a change.
    """

    def __init__(
        self, steps: BucketSteps, geometries: Mapping[Bucket, Geometry], identity: str
    ) -> None:
        self.steps = steps
        self.geometries = geometries
        self.identity = identity
        self.steps_per_epoch = steps.steps_per_epoch

    def num_microbatches(self, step: int) -> int:
        """Return how many micro-batches each data-parallel rank has in a step.

        The number is the same in all steps, so ``step`` is unused.
        """
        return self.steps.num_microbatches

    def microbatches(
        self, step: int, rank: int, first_sample: int
    ) -> list[tuple[Bucket, list[int], range]]:
        """Return the clips of each micro-batch of a data-parallel rank in a step.

        Each micro-batch is (bucket, numbers of its clips in the dataset, numbers of its samples in
        the run). ``first_sample`` is the number of the first sample of the step.
        """
        ranks = [self.steps.microbatches(step, other) for other in range(self.steps.num_ranks)]
        planned = []
        first = first_sample
        for number in range(self.steps.num_microbatches):
            for other, of_rank in enumerate(ranks):
                bucket, clips = of_rank[number]
                if other == rank:
                    planned.append((bucket, clips, range(first, first + len(clips))))
                first += len(clips)
        return planned

    def sequences(self, step: int) -> list[Geometry]:
        """Return the `Geometry` of every clip of a step, over all ranks."""
        return [
            self.geometries[bucket]
            for rank in range(self.steps.num_ranks)
            for bucket, clips in self.steps.microbatches(step, rank)
            for _ in clips
        ]
