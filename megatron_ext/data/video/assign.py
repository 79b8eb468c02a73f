"""Which bucket a clip goes into, and why a clip goes into none.

The rule is Open-Sora 2.0's; every draw depends on ``(seed, epoch, clip)`` alone, so that any
process, in any order, finds the same bucket.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from megatron_ext.data.video.geometry import Bucket, BucketPlan, nearest_size, pixel_budget

SMALLEST_SHARE = 0.8
"""A clip may have this share of the pixels of a resolution, and is then enlarged."""


class Drop(str, Enum):
    """Why a clip is left out; the values are what reports show."""

    UNREADABLE = "cannot be read"
    NO_CAPTION = "has no caption"
    TOO_SMALL = "has too few pixels for every resolution of the bucket plan"
    TOO_SHORT = "has fewer frames than every bucket of its resolutions"
    NOT_DRAWN = "was not drawn by the probabilities of its buckets"


@dataclass(frozen=True)
class ClipShape:
    """What a file says of itself.

    Attributes:
        num_frames: frames of the file; 1 for an image.
        height, width: pixels.
        fps: frames per second; 0 for an image.
    """

    num_frames: int
    height: int
    width: int
    fps: float


def subsampling(fps: float, fps_cap: int) -> tuple[int, int]:
    """Interval between the frames that are kept, and the whole frame rate that results.

    Open-Sora's rule: ``ceil(fps / cap)`` and ``floor(fps / interval)``. An image, of 0 frames per
    second, gives ``(1, 0)``.
    """
    interval = max(1, math.ceil(fps / fps_cap))
    return interval, math.floor(fps / interval)


def available_frames(clip: ClipShape, fps_cap: int) -> int:
    """Frames left after subsampling, the first included."""
    return -(-clip.num_frames // subsampling(clip.fps, fps_cap)[0])


def assign(
    clip: ClipShape, plan: BucketPlan, number: int, *, seed: int, epoch: int = 0, fps_cap: int = 24
) -> Bucket | Drop:
    """The bucket of a clip, or why it has none.

    Resolutions are tried from large to small. Within one, a video takes the longest bucket that it
    fills, an image the one of a single frame; where the draw against its probability fails, the
    next resolution is tried.

    Args:
        clip: what it offers.
        plan: the buckets.
        number: of the clip in its list.
        seed, epoch: of the draws.
        fps_cap: frames per second, at most.
    """
    draws = np.random.Generator(np.random.PCG64((seed, epoch, number)))
    frames = available_frames(clip, fps_cap)
    reason = Drop.TOO_SMALL
    for resolution in plan.resolutions:
        # One draw for each resolution, taken or not: adding a bucket moves no other draw.
        draw = float(draws.random())
        if clip.height * clip.width < SMALLEST_SHARE * pixel_budget(resolution):
            continue
        lengths = plan.rules[resolution]
        length = max((n for n in lengths if n <= frames and (n == 1) == (frames == 1)), default=0)
        if not length:
            reason = Drop.TOO_SHORT if reason is Drop.TOO_SMALL else reason
            continue
        if draw < lengths[length].probability:
            return Bucket(resolution, length, *nearest_size(resolution, clip.height, clip.width))
        reason = Drop.NOT_DRAWN
    return reason


def first_frame(
    clip: ClipShape, num_frames: int, number: int, *, seed: int, epoch: int, fps_cap: int
) -> int:
    """The frame of the file at which a random crop of a bucket's length begins.

    Drawn from ``(seed, epoch, clip)``, so that no two loader processes repeat one another's crops.
    """
    interval = subsampling(clip.fps, fps_cap)[0]
    spare = available_frames(clip, fps_cap) - num_frames
    draws = np.random.Generator(np.random.PCG64((seed, epoch, number, 1)))
    return interval * int(draws.integers(spare + 1))


def explain(dropped: Iterable[Drop], total: int) -> list[str]:
    """One line for each reason, most frequent first; none where nothing was dropped."""
    counts = Counter(dropped)
    return [
        f"{count} of {total} clips dropped: the clip {reason.value}."
        for reason, count in counts.most_common()
    ]
