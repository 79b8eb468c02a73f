"""Defines the sizes of clips and the plan of buckets, and assigns clips to buckets.

The rules are those of Open-Sora 2.0 (arXiv:2503.09642). A resolution is a number of pixels. For
each aspect ratio, height and width are multiples of 16 whose product is close to that number.
Random choices depend only on the seed and the clip, so the assignment is the same in every process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_ext.disk.reading import UnreadableFile, parse_json, shortened
from megatron_ext.errors import ConfigError

MULTIPLE = 16
ASPECT_RATIOS = (1.0, 4 / 3, 3 / 2, 8 / 5, 16 / 9, 1.85, 1.89, 2.0, 2.39)
"""Width over height of landscape frames; portrait frames have height and width swapped."""

_NAME = re.compile(r"(\d+)(px|p)")


def pixel_budget(resolution: str) -> int:
    """Return the number of pixels of a frame: 256² for ``256px``, 1280 × 720 for ``720p``.

    A name of another form, or a side below 16 pixels, raises ConfigError.
    """
    match = _NAME.fullmatch(resolution)
    side = int(match[1]) if match else 0
    if match is None or side < MULTIPLE:
        raise ConfigError(
            f"The resolution ({resolution}) must be a number of at least {MULTIPLE} with px or p, "
            "such as 256px (a square of this side) or 720p (16:9 of this height); correct it."
        )
    return side * side if match[2] == "px" else side * side * 16 // 9


@lru_cache
def sizes(resolution: str) -> tuple[tuple[int, int], ...]:
    """Return each distinct (height, width) of a resolution, landscape before portrait."""
    budget = pixel_budget(resolution)
    frame_sizes = [_size(budget, ratio) for ratio in ASPECT_RATIOS]
    frame_sizes += [(width, height) for height, width in frame_sizes]
    return tuple(dict.fromkeys(frame_sizes))


def _size(budget: int, ratio: float) -> tuple[int, int]:
    """Return the (height, width) for a number of pixels and an aspect ratio.

    Round both sides down to multiples of 16. Then change one side by 16 if this brings the number
    of pixels closer to the budget.
    """
    width = max(MULTIPLE, math.floor(math.sqrt(budget * ratio) / MULTIPLE) * MULTIPLE)
    height = max(MULTIPLE, budget // width // MULTIPLE * MULTIPLE)
    candidates = [(height, width)]
    for step in (MULTIPLE, -MULTIPLE):
        candidates += [(height + step, width), (height, width + step)]
    whole = [size for size in candidates if min(size) >= MULTIPLE]
    return min(whole, key=lambda size: abs(size[0] * size[1] - budget))


def nearest_size(resolution: str, height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) of a resolution whose aspect ratio is nearest to a frame's.

    ``resolution`` names a number of pixels, such as ``256px`` or ``720p``; `sizes` has its choices.
    The frame has the size ``height`` x ``width``. The nearest ratio is the one whose logarithm
    differs least.
    """
    log_ratio = math.log(height / width)
    return min(sizes(resolution), key=lambda size: abs(math.log(size[0] / size[1]) - log_ratio))


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of clips that train together, in pixels; images have one frame.

    ``resolution`` is the name of a number of pixels, such as ``256px``.
    """

    resolution: str
    num_frames: int
    height: int
    width: int

    def __str__(self) -> str:
        """Return resolution, frames, height and width as text, such as ``256px 17x192x336``."""
        return f"{self.resolution} {self.num_frames}x{self.height}x{self.width}"


@dataclass(frozen=True)
class BucketRule:
    """The share of fitting clips that enter a bucket, and the bucket's micro-batch size.

    A value out of range raises ConfigError.

    Attributes:
        probability: probability that a clip that fits enters the bucket, in [0, 1].
        micro_batch_size: number of clips of a micro-batch on one rank; None takes
            ``--micro-batch-size``.
    """

    probability: float
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ConfigError(
                f"The probability of a bucket ({self.probability}) must lie between 0 and 1; "
                "1 takes every clip that fits."
            )
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ConfigError(
                f"The micro-batch size of a bucket ({self.micro_batch_size}) must be at least 1; "
                "set the probability to 0 to close the bucket."
            )


@dataclass(frozen=True)
class BucketPlan:
    """The rules of all buckets, by resolution and number of frames.

    ConfigError is raised if all probabilities are 0, a resolution has an unknown form, or a number
    of frames is below 1.
    """

    rules: Mapping[str, Mapping[int, BucketRule]]

    def __post_init__(self) -> None:
        for resolution, lengths in self.rules.items():
            pixel_budget(resolution)
            for frames in lengths:
                if frames < 1:
                    raise ConfigError(
                        f"A bucket of {resolution} has {frames} frames, but must have at least 1 "
                        "(an image); correct the bucket plan."
                    )
        if not any(rule.probability for r in self.rules.values() for rule in r.values()):
            raise ConfigError(
                f"The bucket plan ({self.as_json()}) is empty: it must hold a bucket with a "
                'probability above 0, such as {"256px": {"17": 1.0}}.'
            )

    def as_dict(self) -> dict[str, dict[str, list[float | None]]]:
        """Return the plan as JSON values, which `parse_plan` reads."""
        return {
            resolution: {str(n): [x.probability, x.micro_batch_size] for n, x in lengths.items()}
            for resolution, lengths in self.rules.items()
        }

    def as_json(self) -> str:
        return json.dumps(self.as_dict())


def parse_plan(given: Any) -> BucketPlan:
    """Parse a plan from a JSON text or from JSON values; raise ConfigError if its form is wrong.

    The form is ``{"256px": {"17": [probability, micro_batch_size]}}``, where 17 is the number of
    frames. The micro-batch size may be null or missing; ``{"256px": {"17": 1.0}}`` has only a
    probability.
    """
    try:
        tree = parse_json(given, "The bucket plan") if isinstance(given, str) else given
        rules = {
            str(resolution): {_whole(frames): _rule(rule) for frames, rule in lengths.items()}
            for resolution, lengths in tree.items()
        }
    except (
        UnreadableFile, ValueError, TypeError, AttributeError, LookupError, ArithmeticError
    ) as error:  # fmt: skip
        why = error.reason if isinstance(error, UnreadableFile) else error
        shown = given if len(str(given)) <= 1000 else shortened(str(given))
        raise ConfigError(
            f"The bucket plan ({shown}) must be JSON such as "
            f'{{"256px": {{"17": [probability, micro-batch size]}}}} ({why}); correct it.'
        ) from None
    return BucketPlan(rules)


def _rule(given: Any) -> BucketRule:
    probability, *rest = given if isinstance(given, (list, tuple)) else [given]
    if len(rest) > 1:
        raise ValueError(f"{given} holds more than a probability and a micro-batch size")
    if isinstance(probability, (bool, str)):
        raise ValueError(f"the probability {probability!r} is no number")
    size = rest[0] if rest else None
    return BucketRule(float(probability), None if size is None else _whole(size))


def _whole(value: Any) -> int:
    """Convert a whole number, or its text, to an int; raise ValueError for anything else."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"{value!r} is no whole number")
    return int(value)


SMALLEST_SHARE = 0.8
"""The least share of a resolution's number of pixels that a clip must have to be used at it.

A clip with fewer pixels than the resolution is enlarged."""


class Drop(str, Enum):
    """The reasons why a clip may be left out; the value is the text that reports show."""

    UNREADABLE = "cannot be read"
    NO_CAPTION = "has no caption"
    TOO_SMALL = "has too few pixels for every resolution of the bucket plan"
    TOO_SHORT = "has fewer frames than every bucket of its resolutions"
    NOT_DRAWN = "was not drawn by the probabilities of its buckets"


@dataclass(frozen=True)
class ClipShape:
    """The shape of a clip as a player shows it; an image has 1 frame, and 0 frames per second.

    Attributes:
        num_frames: number of frames at the rate ``fps``. If the rate varies, a frame that is shown
            longer is counted several times.
        height, width: size of the upright picture, in square pixels.
        fps: frame rate: that in the clip's row, else that of its file; if the latter varies, the
            rate at which most frames follow one another.
        speed: frame rate in the clip's row / frame rate of its file; 1 if either is missing.
    """

    num_frames: int
    height: int
    width: int
    fps: float
    speed: float = 1.0


_SAME_RATE = 1.01
"""The factor by which a clip's rate may exceed ``fps_cap`` without loss of frames.

Headers often say 24.02 for 24."""


def subsampling(
    fps: float, fps_cap: float, video_fps: float | None = None
) -> tuple[int | float, int | float]:
    """Return (interval of the kept frames, frame rate of the kept frames) for a clip.

    The interval is in frames of the clip, whose frame rate is ``fps``. Without ``video_fps`` the
    rule is Open-Sora's: keep every n-th frame, where n is ``ceil(fps / fps_cap)``, with 1% of
    tolerance; the rate of the kept frames is ``floor(fps / n)``. With ``video_fps`` this is their
    rate, and the interval is ``fps / video_fps``, which may be a fraction. For an image, which has
    0 frames per second, the result is ``(1, 0)``.
    """
    if video_fps is not None and fps:
        return fps / video_fps, int(video_fps) if video_fps == int(video_fps) else video_fps
    interval = max(1, math.ceil(fps / (fps_cap * _SAME_RATE)))
    return interval, math.floor(fps / interval)


def available_frames(clip: ClipShape, fps_cap: float, video_fps: float | None = None) -> int:
    """Return the number of frames that `subsampling` keeps; the first frame is always kept."""
    if clip.num_frames == 1:
        return 1
    return math.ceil(clip.num_frames / subsampling(clip.fps, fps_cap, video_fps)[0] - 1e-6)


def assign(
    clip: ClipShape,
    plan: BucketPlan,
    number: int,
    *,
    seed: int,
    fps_cap: int = 24,
    video_fps: float | None = None,
    most_frames: int | None = None,
) -> Bucket | Drop:
    """Return the bucket of a clip, or the reason why it has none.

    Try resolutions from large to small, except those much larger than the clip. A video fits the
    longest bucket for which it has enough frames at the rate that `subsampling` gives; an image
    fits the bucket of one frame. The clip enters this bucket with the bucket's probability;
    otherwise try the next resolution. The random choices depend on ``seed`` and ``number``, the
    clip's number in its list. A clip with more than ``most_frames`` frames at that rate is treated
    as if it had ``most_frames``; None means no limit.
    """
    draws = np.random.Generator(np.random.PCG64((seed, 0, number)))
    frames = available_frames(clip, fps_cap, video_fps)
    frames = min(frames, most_frames or frames)
    reason = Drop.TOO_SMALL
    for resolution in sorted(plan.rules, key=pixel_budget, reverse=True):
        # Draw for each resolution, even if the number is not needed: then a new bucket in the plan
        # does not change the numbers of the others.
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
    clip: ClipShape,
    num_frames: int,
    number: int,
    *,
    seed: int,
    fps_cap: int,
    video_fps: float | None = None,
) -> int | float:
    """Return the random start of a temporal crop, in frames of the clip.

    The crop has ``num_frames`` frames at the rate that `subsampling` gives. The start depends on
    ``seed`` and ``number``, the clip's number in its list.
    """
    interval = subsampling(clip.fps, fps_cap, video_fps)[0]
    spare = available_frames(clip, fps_cap, video_fps) - num_frames
    draws = np.random.Generator(np.random.PCG64((seed, 0, number, 1)))
    return interval * int(draws.integers(spare + 1))


def window_starts(
    available: int, length: int, windows: str, *, stride: int | None, count: int | None
) -> list[int]:
    """Return the first frame of each window of a clip; frames are counted at the rate of samples.

    Args:
        available: number of frames of the clip at the rate of samples, at least ``length``.
        length: number of frames of a window.
        windows: "first" for one window at frame 0; "uniform" for ``count`` windows spread evenly
            from beginning to end, but no more than fit without overlap; or "all" for a window at
            each multiple of ``stride``.
        stride: number of frames from one window's start to the next; None means ``length``.
        count: the largest number of windows; None for no limit.
    """
    if windows == "first":
        return [0]
    spare = available - length
    if windows == "all":
        return list(range(0, spare + 1, stride or length))[:count]
    num_windows = min(count or available, available // length)
    return [round(i * spare / max(num_windows - 1, 1)) for i in range(num_windows)]
