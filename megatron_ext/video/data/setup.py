"""The data of a video run: opened, planned and checked before it starts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_ext.config.rules.optimizer import optimizer_errors, with_warmup
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.train.task import Datasets
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig, TextEncoderConfig
from megatron_ext.video.config.run import ConditionConfig, SampleConfig, VideoConfig
from megatron_ext.video.cost.clip import Clip
from megatron_ext.video.data.conditions import sections
from megatron_ext.video.data.dataset import ShardedVideos, VideoClips, open_online
from megatron_ext.video.data.encode import reference_name
from megatron_ext.video.data.geometry import parse_plan
from megatron_ext.video.data.manifest import read_manifest
from megatron_ext.video.data.preprocess_options import VideoPreprocessOptions
from megatron_ext.video.data.sampler import BucketSteps, Geometry, VideoPlan
from megatron_ext.video.data.shards import read_null
from megatron_ext.video.model.tokens import grid
from megatron_ext.video.networks import network_of
from megatron_ext.video.sampling.generate import check_sampling

Encoding = tuple[CodecConfig, TextEncoderConfig, EncodeConfig]


def open_videos(config: RunConfig, path: str) -> VideoClips:
    """Open the clips of a folder, or of a list of clips with ``--online-encoding``.

    Raises:
        ConfigError, DataError: see `ShardedVideos` and `open_online`.
    """
    encoding = (
        config.section(CodecConfig),
        config.section(TextEncoderConfig),
        config.section(EncodeConfig),
    )
    return _opened(
        path, config.section(VideoConfig).video_buckets, encoding if _online(config) else None
    )


def manifest_of(config: RunConfig) -> dict[str, Any]:
    """Return the manifest of the training data; clips that are encoded already are not opened."""
    path = config.section(VideoConfig).video_data_path
    assert path is not None
    if _online(config):
        return open_videos(config, path).manifest
    return read_manifest(Path(path))


def null_text_of(config: RunConfig) -> tuple[Tensor, Tensor]:
    """Return the encoded empty caption of the training data, ``[l, d]`` and ``[e]``."""
    path = config.section(VideoConfig).video_data_path
    assert path is not None
    if _online(config):
        return open_videos(config, path).null_text
    return read_null(Path(path), manifest_of(config))


def _online(config: RunConfig) -> bool:
    return config.section(VideoConfig).online_encoding


@lru_cache(maxsize=4)
def _opened(path: str, buckets: str | None, encoding: Encoding | None) -> VideoClips:
    """Open clips, checked and planned once, for the ranks that are forked later too."""
    plan = None if buckets is None else parse_plan(buckets)
    if encoding is None:
        return ShardedVideos(path, plan)
    assert plan is not None
    codec, text_encoder, encode = encoding
    options = VideoPreprocessOptions(
        input=path, output="", plan=plan, codec=codec, text_encoder=text_encoder, encode=encode
    )
    return open_online(options, tell=int(os.environ.get("RANK", "0")) == 0)


@dataclass(frozen=True)
class VideoSplit:
    """One split, and the order of its clips."""

    path: str
    clips: VideoClips
    plan: VideoPlan


def open_split(config: RunConfig, folder: str, *, shuffle: bool) -> VideoSplit:
    """Open a folder and plan its steps.

    Raises:
        ConfigError, DataError: see `ShardedVideos`, `BucketSteps`, `parse_plan`.
    """
    clips = open_videos(config, folder)
    micro_batch_size, batch = config.training.batch_sizes
    replicas = config.parallel.data_parallel_size
    members = clips.members(micro_batch_size)
    steps = BucketSteps(
        members,
        num_ranks=replicas,
        num_microbatches=batch // (micro_batch_size * replicas),
        seed=config.training.seed if shuffle else None,
        mixed=config.section(VideoConfig).mixed_buckets,
        pipeline_size=config.parallel.pipeline_model_parallel_size,
    )
    network = network_of(config)
    for bucket, held in members.items():
        network.check_clips(config, clips.latent_shape(held.clips[0])[1:], f"Clips of {bucket}")
    geometries = {
        bucket: _geometry(config, clips, held.clips[0]) for bucket, held in members.items()
    }
    per_step = batch // micro_batch_size
    units = {
        str(bucket): [len(held.clips), held.micro_batch_size * per_step]
        for bucket, held in members.items()
    }
    deciding = [clips.manifest["fingerprint"], units, batch, config.training.seed]
    identity = hashlib.sha256(json.dumps(deciding).encode()).hexdigest()
    return VideoSplit(folder, clips, VideoPlan(steps, geometries, identity))


def _geometry(config: RunConfig, clips: VideoClips, number: int) -> Geometry:
    shape, network = clips.latent_shape(number), network_of(config)
    t, rows, columns = grid(shape[1:], network.patch_size(config))
    image, text = t * rows * columns, int(clips.manifest["text_length"])
    return Geometry(shape, text + -(text + image) % network.sequence_multiple(config), image)


def build_video_datasets(
    config: RunConfig,
    assets: None,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Open the splits; every rank needs the plan, some read the clips; see `Task.datasets`."""
    video, valid = config.section(VideoConfig), None
    assert video.video_data_path is not None
    if video.video_valid_path is not None:
        valid = open_split(config, video.video_valid_path, shuffle=False)
    train = open_split(config, video.video_data_path, shuffle=True)
    return Datasets(train, valid, None)  # type: ignore[arg-type]


def prepare_video(config: RunConfig) -> tuple[RunConfig, None]:
    """Open the data, check that it fits the run, and fill in what it decides; see `Task.preflight`.

    Raises:
        ConfigError, DataError: the data is not whole or does not fit the flags.
    """
    video = config.section(VideoConfig)
    assert video.video_data_path is not None
    manifest = open_videos(config, video.video_data_path).manifest
    if config.section(SampleConfig).sample_interval is not None:
        check_sampling(config, manifest)
    network = network_of(config)
    config = _with_evaluation(network.checked(network.with_widths(config, manifest)))
    train = open_split(config, video.video_data_path, shuffle=True)
    config = _with_length(config, train.plan.steps_per_epoch)
    _check_references(config, train)
    if video.video_valid_path is not None:
        _check_same_kind(train, open_split(config, video.video_valid_path, shuffle=False))
    if int(os.environ.get("RANK", "0")) == 0:
        print(bucket_table(train), flush=True)
    longest = max(geometry.num_tokens for geometry in train.plan.geometries.values())
    model = dataclasses.replace(
        config.model, seq_length=longest, max_position_embeddings=longest, padded_vocab_size=None
    )
    return dataclasses.replace(config, model=model), None


def _with_evaluation(config: RunConfig) -> RunConfig:
    """Evaluate on the whole validation data, or not at all where there is none."""
    training = config.training
    evaluates = config.section(VideoConfig).video_valid_path is not None and training.eval_iters > 0
    training = dataclasses.replace(
        training, full_validation=evaluates, eval_iters=training.eval_iters if evaluates else 0
    )
    return dataclasses.replace(config, training=training)


def _with_length(config: RunConfig, steps_per_epoch: int) -> RunConfig:
    """Count epochs in steps, and shorten a warm-up for which the run has no room.

    Raises:
        ConfigError: the flags do not fit the number of steps.
    """
    training = config.training.in_steps(steps_per_epoch)
    optimizer = with_warmup(config.optimizer, training)
    if optimizer != config.optimizer and int(os.environ.get("RANK", "0")) == 0:
        for note in optimizer.warmup_notes():
            print(f"> {note}", flush=True)
    errors = optimizer_errors(optimizer, training)
    if errors:
        raise ConfigError(errors)
    return dataclasses.replace(config, training=training, optimizer=optimizer)


def _check_references(config: RunConfig, split: VideoSplit) -> None:
    """Check that every reference for which a mode may ask has been encoded."""
    conditions = config.section(ConditionConfig)
    for mode in conditions.modes:
        lengths = {geometry.shape[1] for geometry in split.plan.geometries.values()}
        for t in lengths:
            try:
                wanted = sections(mode, t, conditions)
            except DataError:
                continue  # such clips are never drawn for this mode
            for section in wanted:
                name = reference_name("tail" if section.start else "head", section.length)
                if name not in split.clips.manifest["references"]:
                    raise ConfigError(
                        f"`--{mode.replace('_', '-')}-weight` ({conditions.weight(mode)}) "
                        f"needs references of {section.length} latent frame(s), but the data has "
                        f"{', '.join(split.clips.manifest['references']) or 'none'}; preprocess "
                        f"it with `--reference-lengths {section.length}`, or set the weight to 0."
                    )


def _check_same_kind(train: VideoSplit, valid: VideoSplit) -> None:
    """Check that validation clips have been encoded as the training clips were."""
    for name in ("codec", "text_encoder"):
        if train.clips.manifest[name] != valid.clips.manifest[name]:
            raise ConfigError(
                f"`--video-valid-path` ({valid.path}) was encoded by another "
                f"{name.replace('_', ' ')} than `--video-data-path` ({train.path}); "
                "preprocess both alike."
            )


def planned_clips(config: RunConfig) -> list[Clip]:
    """Return the buckets of the training data that fill steps; see `Task.clips`."""
    video_data_path = config.section(VideoConfig).video_data_path
    assert video_data_path is not None
    plan = open_split(config, video_data_path, shuffle=False).plan
    patch, steps = network_of(config).patch_size(config), plan.steps
    units = {
        bucket: (len(held.clips) - steps.left_out[bucket]) // held.micro_batch_size
        for bucket, held in steps.buckets.items()
    }
    found = []
    for bucket, count in sorted(units.items()):
        geometry, held = plan.geometries[bucket], steps.buckets[bucket]
        if count:
            found.append(
                Clip(
                    str(bucket),
                    *grid(geometry.shape[1:], patch),
                    num_text=geometry.num_text,
                    micro_batch_size=held.micro_batch_size,
                    share=count / sum(units.values()),
                )
            )
    return found


def bucket_table(split: VideoSplit) -> str:
    """Return the buckets of a split, one a line, with the clips that an epoch leaves out."""
    steps = split.plan.steps
    lines = [
        f"  {bucket!s:28} {len(members.clips):8d} clips, micro-batches of "
        f"{members.micro_batch_size}, {steps.left_out[bucket]} left out of each epoch, sequences "
        f"of {split.plan.geometries[bucket].num_tokens} tokens"
        for bucket, members in sorted(steps.buckets.items(), key=lambda entry: entry[0])
    ]
    return "\n".join([f"> buckets, {steps.steps_per_epoch} steps an epoch:", *lines])
