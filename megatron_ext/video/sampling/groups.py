"""Groups requests for clips that can be sampled together: those of one size and number of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import EncodeConfig, encode_of
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.sampling.requests import ClipRequest


@dataclass(frozen=True)
class SampleShape:
    """The size of sampled clips in frames and pixels; a clip of one frame is an image.

    Attributes:
        fps: frames per second; captions of videos state it if ``encode.fps_words`` is set.
        encode: flags with which the training data was encoded; references and captions are encoded
            in the same way.
    """

    num_frames: int
    height: int
    width: int
    fps: float = 24
    encode: EncodeConfig = field(default_factory=EncodeConfig)


@dataclass(frozen=True)
class RequestGroup:
    """Requests for clips of one size, sampled in the same number of steps.

    Attributes:
        numbers: index of each request among all requests.
        shape: size of the clips of this group.
        sampling: flags of sampling, with the number of steps of this group.
        draws: for each request (seed, number), the two numbers that determine its noise; see
            `groups_of`.
    """

    numbers: list[int]
    requests: list[ClipRequest]
    shape: SampleShape
    sampling: SampleConfig
    draws: list[tuple[int, int]]


def groups_of(
    requests: Sequence[ClipRequest], shape: SampleShape, sampling: SampleConfig
) -> list[RequestGroup]:
    """Group the requests with the same clip size and number of steps.

    A request that lacks a size, steps or a seed gets those of ``shape`` and ``sampling``. A seed
    and a number determine the noise. The number is the request's index, or 0 if the request has
    its own seed, so that the clip then does not depend on the request's position in the file.
    """
    groups = dict[tuple[Any, int], RequestGroup]()
    for number, request in enumerate(requests):
        height, width = request.size or (shape.height, shape.width)
        steps = request.steps or sampling.sample_steps
        own = replace(shape, height=height, width=width)
        empty = RequestGroup([], [], own, replace(sampling, sample_steps=steps), [])
        group = groups.setdefault(((height, width), steps), empty)
        group.numbers.append(number)
        group.requests.append(request)
        draw = (sampling.sample_seed, number) if request.seed is None else (request.seed, 0)
        group.draws.append(draw)
    return [*groups.values()]


def shape_of(sample: SampleConfig, manifest: Mapping[str, Any]) -> SampleShape:
    """Return the size of clips to sample, from the flags or the dataset's ``manifest``.

    Values that the flags leave out are those of the dataset's largest bucket; ConfigError is raised
    if it has none.
    """
    fps = sample.sample_fps or manifest["fps"]
    size = sample.sample_size
    frames = sample.sample_frames
    if size is None or frames is None:
        buckets = [Bucket(**entry["shape"]) for entry in manifest["buckets"]]
        if not buckets:
            raise ConfigError(
                "`--sample-size` and `--sample-frames` are missing, which no data gives here; give "
                "the height and width of clips, and the number of their frames."
            )
        largest = max(buckets, key=lambda b: (b.height * b.width, b.num_frames, b))
        size = size or (largest.height, largest.width)
        frames = frames or largest.num_frames
    return SampleShape(frames, *size, fps, encode_of(manifest))
