"""The data of a video run: opened, planned and checked before it starts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.train.task import Datasets
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig, TextEncoderConfig
from megatron_ext.video.config.mmdit import MMDiTConfig
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
from megatron_ext.video.microbatch import patch_size_of, sequence_multiple, with_widths
from megatron_ext.video.model.mmdit.options import stage_blocks
from megatron_ext.video.model.tokens import grid
from megatron_ext.video.sampling.generate import check_sampling
from megatron_ext.video.step import check_clips, check_dit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from megatron_ext.config.run import RunConfig

from megatron_ext.config.rules.optimizer import optimizer_errors, with_warmup

Encoding = tuple[CodecConfig, TextEncoderConfig, EncodeConfig]


def open_videos(config: RunConfig, path: str) -> VideoClips:
    """The clips of a folder, or of a list of clips with ``--online-encoding``.

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
    """What the training data says of itself; clips that are encoded already are not opened."""
    path = config.section(VideoConfig).video_data_path
    assert path is not None
    if _online(config):
        return open_videos(config, path).manifest
    return read_manifest(Path(path))


def null_text_of(config: RunConfig) -> tuple[Tensor, Tensor]:
    """The encoded empty caption of the training data, ``[l, d]`` and ``[e]``."""
    path = config.section(VideoConfig).video_data_path
    assert path is not None
    if _online(config):
        return open_videos(config, path).null_text
    return read_null(Path(path), manifest_of(config))


def _online(config: RunConfig) -> bool:
    return config.section(VideoConfig).online_encoding


@lru_cache(maxsize=4)
def _opened(path: str, buckets: str | None, encoding: Encoding | None) -> VideoClips:
    """Checked and planned once, for the ranks that are forked later too."""
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
    """One split, and in which order its clips come."""

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
    for bucket, held in members.items():
        if config.section(VideoConfig).uses_dit:
            check_clips(config, clips.latent_shape(held.clips[0])[1:], f"Clips of {bucket}")
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
    shape = clips.latent_shape(number)
    t, rows, columns = grid(shape[1:], patch_size_of(config))
    image, text = t * rows * columns, int(clips.manifest["text_length"])
    return Geometry(shape, text + -(text + image) % sequence_multiple(config), image)


def build_video_datasets(
    config: RunConfig,
    assets: None,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """See `Task.datasets`; every rank needs the plan, the clips are read by some."""
    video, valid = config.section(VideoConfig), None
    assert video.video_data_path is not None
    if video.video_valid_path is not None:
        valid = open_split(config, video.video_valid_path, shuffle=False)
    train = open_split(config, video.video_data_path, shuffle=True)
    return Datasets(train, valid, None)  # type: ignore[arg-type]


def prepare_video(config: RunConfig) -> tuple[RunConfig, None]:
    """Open the data, check that it fits the run, and fill in what it decides; see `Task.preflight`.

    Raises:
        ConfigError, DataError: data that is not whole or does not fit the flags.
    """
    video = config.section(VideoConfig)
    assert video.video_data_path is not None
    manifest = open_videos(config, video.video_data_path).manifest
    if config.section(SampleConfig).sample_interval is not None:
        check_sampling(config, manifest)
    config = _with_evaluation(_with_model(config, manifest))
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


def _with_model(config: RunConfig, manifest: Mapping[str, Any]) -> RunConfig:
    """With the model for the data, which the ranks must be able to share."""
    config = with_widths(config, manifest)
    if config.section(VideoConfig).uses_dit:
        check_dit(config)
        return config
    mmdit = dataclasses.replace(
        config.section(MMDiTConfig), cond_embed=config.section(ConditionConfig).modes != ("t2v",)
    )
    sizes, parallel = mmdit.sizes(config.model), config.parallel
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    num_stages = parallel.pipeline_model_parallel_size * chunks
    stage_blocks(sizes, num_stages, mmdit.double_block_cost)
    shared = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    if parallel.cp_comm_type[0] == "a2a" and sizes.num_heads % shared:
        raise ConfigError(
            f"`--cp-comm-type a2a` trades heads ({sizes.num_heads}), which must be divisible by "
            f"tensor x context parallel size ({shared}); use all_gather."
        )
    return config.with_section(mmdit)


def _with_evaluation(config: RunConfig) -> RunConfig:
    """With evaluation of the whole validation data, or none where there is no such data."""
    training = config.training
    evaluates = config.section(VideoConfig).video_valid_path is not None and training.eval_iters > 0
    training = dataclasses.replace(
        training, full_validation=evaluates, eval_iters=training.eval_iters if evaluates else 0
    )
    return dataclasses.replace(config, training=training)


def _with_length(config: RunConfig, steps_per_epoch: int) -> RunConfig:
    """With epochs counted in steps, and a warm-up that such a run has room for.

    Raises:
        ConfigError: flags that do not fit the number of steps.
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
    """Every reference that a mode may ask for must have been encoded."""
    conditions = config.section(ConditionConfig)
    for mode in conditions.modes:
        lengths = {geometry.shape[1] for geometry in split.plan.geometries.values()}
        for t in lengths:
            try:
                wanted = sections(mode, t, config.section(ConditionConfig))
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
    """Validation clips must have been encoded as the training clips were."""
    for name in ("codec", "text_encoder"):
        if train.clips.manifest[name] != valid.clips.manifest[name]:
            raise ConfigError(
                f"`--video-valid-path` ({valid.path}) was encoded by another "
                f"{name.replace('_', ' ')} than `--video-data-path` ({train.path}); "
                "preprocess both alike."
            )


def planned_clips(config: RunConfig) -> list[Clip]:
    """The buckets of the training data that fill steps; see `Task.clips`."""
    video_data_path = config.section(VideoConfig).video_data_path
    assert video_data_path is not None
    plan = open_split(config, video_data_path, shuffle=False).plan
    patch, steps = patch_size_of(config), plan.steps
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
    """The buckets of a split, one a line, with the clips that an epoch leaves out."""
    steps = split.plan.steps
    lines = [
        f"  {bucket!s:28} {len(members.clips):8d} clips, micro-batches of "
        f"{members.micro_batch_size}, {steps.left_out[bucket]} left out of each epoch, sequences "
        f"of {split.plan.geometries[bucket].num_tokens} tokens"
        for bucket, members in sorted(steps.buckets.items(), key=lambda entry: entry[0])
    ]
    return "\n".join([f"> buckets, {steps.steps_per_epoch} steps an epoch:", *lines])
