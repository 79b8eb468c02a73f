"""Every clip looked at once, before anything is encoded: its bucket, or why it has none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_ext.config.encoding import EncodeConfig
from megatron_ext.data.video.assign import ClipShape, Drop, assign, explain
from megatron_ext.data.video.clips import Clip, probe
from megatron_ext.data.video.codec_base import VideoCodec
from megatron_ext.data.video.encode import PlannedClip
from megatron_ext.data.video.geometry import BucketPlan, sizes
from megatron_ext.errors import ConfigError, DataError


@dataclass(frozen=True)
class Dropped:
    """A clip that is left out.

    Attributes:
        number: in the list.
        path: of its file.
        reason: of which kind.
        detail: what the reader said, for files that cannot be read.
    """

    number: int
    path: str
    reason: Drop
    detail: str = ""


def check_codec(plan: BucketPlan, codec: VideoCodec, reference_lengths: Sequence[int] = ()) -> None:
    """Asks the codec for the latent shape of every bucket that the plan can give.

    Args:
        plan: the buckets.
        codec: what gives the latents.
        reference_lengths: of `EncodeConfig`; 1, which images never have, is always allowed.

    Raises:
        ConfigError: a length or a side does not divide, or no bucket is long enough for a
            reference.
    """
    longest = 1
    for resolution, lengths in plan.rules.items():
        for frames, rule in lengths.items():
            if rule.probability:
                for height, width in sizes(resolution):
                    longest = max(longest, codec.latent_shape(frames, height, width)[1])
    for length in reference_lengths:
        if 1 < length >= longest:
            raise ConfigError(
                f"`reference_lengths` ({length}) must be less than the latent frames of the "
                f"longest bucket ({longest}), or no clip has such a reference; leave it out, or "
                f"add a bucket of at least {length * codec.temporal + 1} frames."
            )


def plan_clips(
    clips: Sequence[Clip],
    plan: BucketPlan,
    config: EncodeConfig,
    *,
    workers: int = 1,
    tick: Callable[[int], None] = lambda done: None,
) -> tuple[list[PlannedClip], list[Dropped]]:
    """Buckets of all clips, from their headers.

    Args:
        clips: the list.
        plan: resolutions and lengths.
        config: frame rate and seed.
        workers: files looked at at a time.
        tick: is told how many clips have been looked at.

    Raises:
        DataError: no clip has a bucket; the sentence gives the reasons.
    """
    planned: list[PlannedClip] = []
    dropped: list[Dropped] = []
    with ThreadPoolExecutor(workers) as pool:
        for number, (clip, seen) in enumerate(zip(clips, pool.map(_look, clips), strict=True)):
            tick(number + 1)
            if not isinstance(seen, ClipShape):
                dropped.append(Dropped(number, clip.path, *seen))
                continue
            bucket = assign(seen, plan, number, seed=config.clip_seed, fps_cap=config.fps_cap)
            if isinstance(bucket, Drop):
                dropped.append(Dropped(number, clip.path, bucket))
            else:
                planned.append(PlannedClip(number, clip, seen, bucket))
    if not planned:
        raise DataError(
            [
                f"None of the {len(clips)} clips has a bucket in the plan ({plan.as_json()}); "
                "choose smaller resolutions or shorter lengths, or give other clips.",
                *report(dropped, len(clips)),
            ]
        )
    return planned, dropped


def _look(clip: Clip) -> ClipShape | tuple[Drop, str]:
    if not clip.caption:
        return Drop.NO_CAPTION, ""
    try:
        return probe(clip)
    except DataError as error:
        return Drop.UNREADABLE, str(error)


def report(dropped: Sequence[Dropped], total: int) -> list[str]:
    """Lines for a person: how many clips each reason cost, with the first file of each."""
    lines = explain([d.reason for d in dropped], total)
    first: dict[Drop, str] = {}
    for d in dropped:
        first.setdefault(d.reason, d.detail or d.path)
    order = [reason for reason, _ in Counter(d.reason for d in dropped).most_common()]
    return [f"{line} First: {first[why]}" for line, why in zip(lines, order, strict=True)]
