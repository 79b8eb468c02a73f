"""Plans and encodes clips, alike in preprocessing and in the data loader.

`plan_clips` reads the header of every clip before anything is encoded, and assigns to each clip a
bucket, or the reason why it has none. `ClipEncoder` then turns each planned clip into a sample.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_ext.data.part_pool import begin_worker
from megatron_ext.errors import ConfigError, DataError, MachineFault, held_signals
from megatron_ext.video.config.encoding import SCENE_THRESHOLD, UNIFORM_WINDOWS, EncodeConfig
from megatron_ext.video.data.clips import Clip, with_suffix
from megatron_ext.video.data.codec import VideoCodec
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.conditions import (
    MASKED_PREFIX,
    named_sections,
    place_pixels,
    reference_name,
)
from megatron_ext.video.data.frames import decode, probe, scene_starts
from megatron_ext.video.data.geometry import (
    Bucket,
    BucketPlan,
    ClipShape,
    Drop,
    assign,
    available_frames,
    first_frame,
    sizes,
    subsampling,
    window_starts,
)
from megatron_ext.video.data.image_encoder import ImageEncoder, build_image_encoder
from megatron_ext.video.data.options import VideoPreprocessOptions
from megatron_ext.video.data.text_encoders import TextEncoder, build_text_encoder


@dataclass(frozen=True)
class PlannedClip:
    """The plan of one sample: the clip from which it is made, and its bucket.

    Attributes:
        number: number of the clip in its list.
        clip: the clip's row in the list.
        shape: shape of the clip's file.
        bucket: bucket of the sample.
        window: (index of the window, its first frame) if the sample is one of several windows cut
            from the clip. The frame is counted at the frame rate of the sample, not of the file.
            If None, ``--temporal-crop`` decides where in the clip the sample begins.
    """

    number: int
    clip: Clip
    shape: ClipShape
    bucket: Bucket
    window: tuple[int, int] | None = None

    def key(self, row: str) -> str:
        """Return the key that identifies the sample in a dataset.

        It is ``row``, the key of the clip's row, or ``row.2`` for the window with index 2.
        """
        return row if self.window is None else f"{row}.{self.window[0]}"


@dataclass(frozen=True)
class VideoSample:
    """One encoded clip.

    Attributes:
        latents: ``[c, t, h, w]``.
        text: embeddings of the caption's tokens, ``[l, d]``.
        pooled: embedding of the whole caption, ``[e]``.
        references: latents ``[c, k, h, w]`` of k < t latent frames, which are encoded without the
            rest of the clip, by names such as ``head1``; and latents ``[c, t, h, w]`` of copies of
            the clip that are zero at all frames but some, by names such as ``masked_head1``.
        fps: frames per second of the sample, rounded to a whole number; 0 for an image.
        number: number of the clip in its list.
        caption: the caption that the text encoder got, with frame rate and motion.
        image_embeds: the image encoder's output for the first, last or middle frame, ``[tokens,
            width]``, by "head", "tail" and "middle"; empty without an image encoder.
    """

    latents: Tensor
    text: Tensor
    pooled: Tensor
    references: dict[str, Tensor]
    fps: int
    number: int
    caption: str
    image_embeds: dict[str, Tensor] = field(default_factory=dict)


class ClipEncoder:
    """Turns planned clips into samples, by a codec, a text encoder and perhaps an image encoder."""

    def __init__(
        self,
        config: EncodeConfig,
        codec: VideoCodec,
        text_encoder: TextEncoder,
        image_encoder: ImageEncoder | None = None,
    ) -> None:
        self.config = config
        self.codec = codec
        self.text_encoder = text_encoder
        self.image_encoder = image_encoder

    @property
    def image_sides(self) -> tuple[str, ...]:
        """Return the frames that get an image embedding: "head", and as flags say others."""
        masked = self.config.masked_references or ()
        sides = {"head": True, "tail": "tail" in masked or "loop" in masked,
                 "middle": "middle" in masked}  # fmt: skip
        return tuple(side for side, wanted in sides.items() if wanted)

    def _rates(self) -> dict[str, Any]:
        return {"fps_cap": self.config.fps_cap, "video_fps": self.config.video_fps}

    def pixels(self, planned: PlannedClip) -> Tensor:
        """Read the frames of a sample, ``[1, 3, f, H, W]`` float32 in [-1, 1].

        DataError is raised if the file cannot be read.
        """
        config = self.config
        clip = planned.clip
        count = planned.bucket.num_frames
        rates = self._rates()
        interval = subsampling(planned.shape.fps, **rates)[0]
        first: float = 0
        if planned.window is not None:
            first = interval * planned.window[1]
        elif config.temporal_crop == "random":
            seed = config.clip_seed
            first = first_frame(planned.shape, count, planned.number, seed=seed, **rates)
        size = (planned.bucket.height, planned.bucket.width)
        return decode(
            clip, first, interval, count, size, shape=planned.shape, blend=config.video_blend,
            background=config.video_background,
        )[None]  # fmt: skip

    def sample(self, planned: PlannedClip) -> VideoSample:
        """Read and encode one clip and its caption; raise DataError if its file cannot be read."""
        config = self.config
        clip = planned.clip
        pixels = self.pixels(planned)
        moving = planned.bucket.num_frames > 1
        fps = subsampling(planned.shape.fps, **self._rates())[1] if moving else 0
        motion = clip.motion if moving else None
        shown_fps = fps if config.fps_words else None
        caption = caption_for(clip.caption, shown_fps, motion, self.text_encoder)
        text, pooled = self.text_encoder.encode([caption])
        place = "" if planned.window is None else f" of window {planned.window[0]}"
        latents = self.codec.encode(pixels, number=planned.number, piece=f"clip{place}")
        return VideoSample(
            latents=latents[0].cpu(),
            text=text[0].cpu(),
            pooled=pooled[0].cpu(),
            references=self._references(pixels, latents.size(2), planned.number, place),
            fps=round(fps),
            number=planned.number,
            caption=caption,
            image_embeds=self._image_embeds(pixels, latents.size(2)),
        )

    def _image_embeds(self, pixels: Tensor, num_latent_frames: int) -> dict[str, Tensor]:
        """Return the image embeddings of the frames of a clip that are given alone in some mode."""
        if self.image_encoder is None:
            return {}
        embeds = {}
        for side in self.image_sides:
            given = named_sections(f"{side}1", num_latent_frames)
            if side == "head" or given:
                first = given[0].first_pixel_frame(self.codec.temporal) if given else 0
                embeds[side] = self.image_encoder.encode(pixels[:, :, first])[0].cpu()
        return embeds

    def _references(
        self, pixels: Tensor, num_latent_frames: int, number: int, place: str
    ) -> dict[str, Tensor]:
        """Return the latents of a clip's given frames by name, such as ``head1``.

        They are left out unless they are fewer than those of the clip, which has
        ``num_latent_frames`` latent frames. Random latents depend on ``number``, the clip's number,
        and ``place``, which names the window of the clip, such as " of window 2", or is "".
        """
        references = {}
        temporal = self.codec.temporal
        for name in reference_names(self.config):
            given = named_sections(name, num_latent_frames)
            if given is None:
                continue
            pieces = []
            for section in given:
                first = section.first_pixel_frame(temporal)
                stop = first + (section.length - 1) * temporal + 1
                pieces.append((section, pixels[:, :, first:stop]))
            if name.startswith(MASKED_PREFIX):
                # As in Wan's pipelines, the condition is no random sample.
                alone = place_pixels(pieces, pixels.shape, temporal)
                latents = self.codec.encode(alone, mean=True)
            else:
                latents = self.codec.encode(pieces[0][1], number=number, piece=f"{name}{place}")
            references[name] = latents[0].cpu()
        return references


def encoder_of(
    options: VideoPreprocessOptions, device: torch.device | None, codec: VideoCodec | None = None
) -> ClipEncoder:
    """Build the encoders that the options name, on ``device``; ``codec`` is one built already."""
    return ClipEncoder(
        options.encode,
        codec or build_codec(options.codec, device, options.encode.clip_seed),
        build_text_encoder(options.text_encoder, device),
        build_image_encoder(options.image_encoder, device),
    )


def caption_for(
    caption: str, fps: float | None, motion: float | None, text_encoder: TextEncoder
) -> str:
    """Return the caption with its suffix of frame rate ``fps`` and motion score.

    If the text encoder would cut the suffix off, its words come before the caption instead. None
    leaves a value out.
    """
    ended = with_suffix(caption, fps, motion)
    if ended != caption and text_encoder.cuts(ended):
        return with_suffix(caption, fps, motion, first=True)
    return ended


def reference_names(config: EncodeConfig) -> tuple[str, ...]:
    """Return the names of the given frames that are encoded for clips.

    With the default flags these are ``head1`` and ``tail1``, frames that are encoded alone. Names
    such as ``masked_head1`` stand for copies of the clip in which only these frames are not zero.
    """
    both = ("head", "tail")
    lengths = config.reference_lengths
    alone = [reference_name(side, length) for length in lengths for side in both]
    if config.middle_reference:
        alone.append(reference_name("middle", 1))
    masked = []
    for side in config.masked_references or ():
        if side == "none":
            masked.append(side)
        else:
            masked += [reference_name(side, x) for x in (lengths if side in both else (1,))]
    return (*alone, *(f"{MASKED_PREFIX}{name}" for name in masked))


@dataclass(frozen=True)
class Dropped:
    """A clip that is left out, and why.

    ``detail`` is the error message if the file could not be read, else "".
    """

    number: int
    path: str
    reason: Drop
    detail: str = ""


def check_codec(plan: BucketPlan, codec: VideoCodec, config: EncodeConfig) -> None:
    """Raise ConfigError if the codec cannot encode a bucket, or no clip has frames to be given.

    Given frames that ``config`` asks for by a flag must be fewer than those of the longest bucket;
    those of one latent frame at the ends, which are the default, need not. Buckets with probability
    0 are ignored.
    """
    longest = 1
    for resolution, lengths in plan.rules.items():
        for frames in (n for n, rule in lengths.items() if rule.probability):
            for height, width in sizes(resolution):
                longest = max(longest, codec.latent_shape(frames, height, width)[1])
    for length in config.reference_lengths:
        if 1 < length >= longest:
            raise ConfigError(
                f"`reference_lengths` ({length}) must be less than the latent frames of the "
                f"longest bucket ({longest}), or no clip has such a reference; leave it out, or "
                f"add a bucket of at least {length * codec.temporal + 1} frames."
            )
    for name in reference_names(config):
        masked = name.startswith(MASKED_PREFIX)
        if (masked or name.startswith("middle")) and named_sections(name, longest) is None:
            needed = 3 if "middle" in name else 2
            raise ConfigError.about(
                "--masked-references" if masked else "--middle-reference",
                name.removeprefix(MASKED_PREFIX).rstrip("0123456789") if masked else None,
                f"needs clips of {needed} latent frames, but the longest bucket has {longest}",
                f"leave it out, or add a bucket of at least {(needed - 1) * codec.temporal + 1} "
                "frames",
            )


def plan_clips(
    clips: Sequence[Clip],
    plan: BucketPlan,
    config: EncodeConfig,
    *,
    numbers: Sequence[int] | None = None,
    workers: int = 1,
    tick: Callable[[int], None] = lambda done: None,
    may_be_empty: bool = False,
) -> tuple[list[PlannedClip], list[Dropped]]:
    """Assign each clip to a bucket; return the planned samples and the dropped clips.

    A clip gives several samples if ``config`` asks for windows. ``workers`` processes read the
    headers of the files. After each clip, ``tick`` is called with the number of clips read so far.
    ``numbers`` are the numbers of the clips in their list; None numbers them from 0. If there is
    no sample, a DataError gives the reasons, unless ``may_be_empty`` is set.
    """
    planned: list[PlannedClip] = []
    dropped: list[Dropped] = []
    numbers = range(len(clips)) if numbers is None else numbers
    results = zip(clips, numbers, _probe_all(clips, config, workers), strict=True)
    for count, (clip, number, probed) in enumerate(results, 1):
        tick(count)
        if isinstance(probed, Dropped):
            dropped.append(replace(probed, number=number))
            continue
        scenes = None if probed.scenes is None else _scenes(probed, config)
        bucket = assign(
            probed.shape,
            plan,
            number,
            seed=config.clip_seed,
            fps_cap=config.fps_cap,
            video_fps=config.video_fps,
            most_frames=_most_frames(config, scenes),
        )
        if isinstance(bucket, Drop):
            dropped.append(Dropped(number, clip.path, bucket))
        else:
            planned += _windows(PlannedClip(number, clip, probed.shape, bucket), config, scenes)
    if not planned and not may_be_empty:
        sentence = (
            f"None of the {len(clips)} clips has a bucket in the plan ({plan.as_json()}); "
            "choose smaller resolutions or shorter lengths, or give other clips."
        )
        raise DataError([sentence, *report(dropped, len(clips))])
    return planned, dropped


def _scenes(seen: _Probed, config: EncodeConfig) -> list[range]:
    """Return the scenes of a clip as ranges of frames, counted at the frame rate of samples."""
    interval = subsampling(seen.shape.fps, config.fps_cap, config.video_fps)[0]
    begins = [math.ceil(place / interval - 1e-6) for place in seen.scenes or ()]
    end = available_frames(seen.shape, config.fps_cap, config.video_fps)
    return [range(a, b) for a, b in pairwise([*begins, end]) if a < b]


def _most_frames(config: EncodeConfig, scenes: Sequence[range] | None) -> int | None:
    """Return the largest number of frames that a sample may have; None if there is no limit.

    The limit is ``--video-window-frames`` or the longest of ``scenes``, whichever is less; a scene
    of one frame counts as two, so that a video does not become an image.
    """
    limits = [] if config.video_window_frames is None else [config.video_window_frames]
    if scenes and scenes[-1].stop > 1:
        # At least 2, so that a video whose scenes have one frame each does not become an image.
        limits.append(max(2, *map(len, scenes)))
    return min(limits, default=None)


def _windows(
    planned: PlannedClip, config: EncodeConfig, scenes: Sequence[range] | None
) -> list[PlannedClip]:
    """Return the samples of a clip, a copy of ``planned`` for each window.

    ``scenes`` are the clip's scenes with ``--video-windows scenes``, else None. Without
    ``--video-windows``, and for an image, the result is ``planned`` alone, which has no window.
    """
    length = planned.bucket.num_frames
    if config.video_windows is None or length == 1:
        return [planned]
    if scenes is not None:
        long = [scene.start for scene in scenes if len(scene) >= length]
        starts = long[: config.video_window_count]
    else:
        uniform = config.video_windows == "uniform"
        starts = window_starts(
            available_frames(planned.shape, config.fps_cap, config.video_fps),
            length,
            config.video_windows,
            stride=config.video_window_stride,
            count=config.video_window_count or (UNIFORM_WINDOWS if uniform else None),
        )
    return [replace(planned, window=window) for window in enumerate(starts)]


@dataclass(frozen=True)
class _Probed:
    """The properties of a clip that planning needs.

    Attributes:
        scenes: the first frame of each scene, in frames of the clip; None if not needed.
    """

    shape: ClipShape
    scenes: list[float] | None


_CLIPS_AT_A_TIME = 16
"""The number of clips that a worker process reads before it reports their properties."""


def _probe_all(
    clips: Sequence[Clip], config: EncodeConfig, workers: int
) -> Iterator[_Probed | Dropped]:
    """Read the properties that planning needs from each clip, in the order of clips.

    Workers are processes, not threads: most of the work is Python code, which holds the GIL.
    """
    probe_one = partial(_probe, config)
    if workers == 1 or len(clips) <= _CLIPS_AT_A_TIME:
        yield from map(probe_one, clips)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, begin_worker, (os.getpid(),)) as pool:
        try:
            with held_signals():
                results = pool.map(probe_one, clips, chunksize=_CLIPS_AT_A_TIME)
            yield from results
        except BrokenProcessPool:
            raise MachineFault(
                "A process died while it looked at clips; if memory ran out use fewer --workers, "
                "and run the same command again."
            ) from None


def _probe(config: EncodeConfig, clip: Clip) -> _Probed | Dropped:
    """Read the properties of a clip that planning needs.

    For a clip that has no caption or cannot be read, return a `Dropped` with the number 0; the
    caller must set the number.
    """
    if not clip.caption:
        return Dropped(0, clip.path, Drop.NO_CAPTION)
    try:
        shape = probe(clip)
        if config.video_windows != "scenes":
            return _Probed(shape, None)
        threshold = config.video_scene_threshold
        threshold = SCENE_THRESHOLD if threshold is None else threshold
        return _Probed(shape, scene_starts(clip, shape, threshold))
    except DataError as error:
        return Dropped(0, clip.path, Drop.UNREADABLE, str(error))


def report(dropped: Sequence[Dropped], total: int) -> list[str]:
    """Return a line for each reason why clips were dropped, the most frequent reason first.

    A line gives the number of clips dropped for this reason, out of ``total``, and the error
    message (or path) of the first of them.
    """
    first = {d.reason: d.detail or d.path for d in reversed(dropped)}
    return [
        f"{count} of {total} clips dropped: the clip {why.value}. First: {first[why].rstrip('.')}."
        for why, count in Counter(d.reason for d in dropped).most_common()
    ]


def sample_rate(planned: PlannedClip, config: EncodeConfig) -> float:
    """Return the frame rate of the sample that a clip becomes; 0 for a picture."""
    if planned.bucket.num_frames == 1:
        return 0
    return subsampling(planned.shape.fps, config.fps_cap, config.video_fps)[1]


def rate_report(planned: Sequence[PlannedClip], config: EncodeConfig) -> list[str]:
    """Return up to two lines of text that report changed speed and repeated frames.

    The first reports clips whose row in the list gives another frame rate than the file. The second
    reports clips that are slower than ``--video-fps``, so that some frames are repeated.
    """
    lines = []
    moving = [p for p in planned if p.bucket.num_frames > 1]
    changed = [p for p in moving if abs(p.shape.speed - 1) > _SAME_SPEED]
    if changed:
        path = changed[0].clip.path
        shape = changed[0].shape
        lines.append(
            f"{len(changed)} of {len(planned)} clips go at the `fps` of their row, not at that of "
            f"their file, so faster or slower than a player shows them. First: {path}, with "
            f"{shape.fps:.4g} instead of {shape.fps / shape.speed:.4g}."
        )
    rate = config.video_fps
    slow = [p for p in moving if rate and p.shape.fps < 0.99 * rate]
    if slow:
        lines.append(
            f"{len(slow)} of {len(planned)} clips are slower than `--video-fps` ({rate:g}), so "
            f"that frames repeat. First: {slow[0].clip.path}, with {slow[0].shape.fps:.4g}."
        )
    return lines


_SAME_SPEED = 0.01
"""The relative difference up to which the frame rate in a clip's row and that of its file are taken
as equal. A row often says 30 for a file of 29.97."""
