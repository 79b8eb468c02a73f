"""Opens and checks the data of a video run before training, and reads it step by step.

In each tensor-parallel group the first rank reads the clips of a micro-batch and broadcasts them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.config.rules.optimizer import optimizer_errors, with_warmup
from megatron_ext.config.run import RunConfig
from megatron_ext.config.training import TrainingConfig
from megatron_ext.data.loader import BatchSource, without_traceback
from megatron_ext.data.workers import worker_context
from megatron_ext.device.streams import to_device
from megatron_ext.disk.bus import worker_setup
from megatron_ext.errors import ConfigError, DataError, MachineFault
from megatron_ext.train.batch_size import StepStats
from megatron_ext.train.run import Run
from megatron_ext.train.task import Datasets, later
from megatron_ext.video.config.encoding import (
    CodecConfig,
    EncodeConfig,
    ImageEncoderConfig,
    TextEncoderConfig,
)
from megatron_ext.video.config.run import ConditionConfig, SampleConfig, VideoConfig
from megatron_ext.video.config.weights import PublishedConfig, check_sizes
from megatron_ext.video.cost.clip import Clip
from megatron_ext.video.data.blend import Blend, blend_of
from megatron_ext.video.data.codecs import check_codec_beside
from megatron_ext.video.data.conditions import Text, masked_name, sections
from megatron_ext.video.data.dataset import (
    ShardedVideos,
    VideoBatch,
    VideoClips,
    collate,
    open_online,
)
from megatron_ext.video.data.geometry import BucketPlan, parse_plan
from megatron_ext.video.data.given_frames import remedy_for
from megatron_ext.video.data.manifest import read_manifest
from megatron_ext.video.data.options import VideoPreprocessOptions
from megatron_ext.video.data.priced_shape import clip_of_shape, prepare_shape
from megatron_ext.video.data.sampler import BucketSteps, Geometry, VideoPlan, must_mix
from megatron_ext.video.data.sets import (
    JoinedVideos,
    check_not_empty,
    joined_manifest,
)
from megatron_ext.video.data.shards import MANIFEST, image_field, other_fields, read_null
from megatron_ext.video.model.tokens import grid
from megatron_ext.video.networks.lookup import network_of, with_widths
from megatron_ext.video.step import FlowMicrobatch

# A run that samples no clips imports no code for it.
check_sampling = later("megatron_ext.video.sampling.check:check_sampling")


def open_videos(config: RunConfig, paths: Sequence[str]) -> VideoClips:
    """Open the clips of folders of shards or, with ``--online-encoding``, of lists.

    ``paths`` is the value of ``--video-data-path`` or of ``--video-valid-path``.
    """
    video = config.section(VideoConfig)
    kinds = (CodecConfig, TextEncoderConfig, EncodeConfig, ImageEncoderConfig)
    encoding = tuple(config.section(x) for x in kinds) if video.online_encoding else None
    if paths == video.video_data_path:
        flag = "--video-data-path"
        blend = blend_of(paths)
    else:
        flag = "--video-valid-path"
        blend = Blend.once(paths)
    return _opened(flag, blend, video.video_buckets, encoding)


@lru_cache(maxsize=4)
def _opened(
    flag: str, blend: Blend, buckets: str | None, encoding: tuple[Any, ...] | None
) -> VideoClips:
    """Open the clips of a blend; a second call with the same arguments returns the same object.

    Processes that are forked later share the object.

    Args:
        flag: the flag that gives the paths of the blend, for errors.
        buckets: the value of ``--video-buckets``.
        encoding: the flags of codec, text encoder, encoding and image encoder with which lists of
            clips are encoded on access; None for folders of shards.
    """
    plan = None if buckets is None else parse_plan(buckets)
    sets = [_opened_set(flag, path, plan, encoding) for path in blend.paths]
    if len(sets) == 1:
        return sets[0]
    check_not_empty(blend, sets, flag)
    return JoinedVideos(blend, sets, plan, flag)


def _opened_set(
    flag: str, path: str, plan: BucketPlan | None, encoding: tuple[Any, ...] | None
) -> VideoClips:
    if encoding is None:
        return ShardedVideos(path, plan)
    assert plan is not None
    if (Path(path) / MANIFEST).is_file():
        raise DataError.about(
            "--online-encoding",
            None,
            f"takes clips, but {path} holds encoded ones",
            "leave it out, or give a folder or a list of clips",
        )
    options = VideoPreprocessOptions(path, "", plan, *encoding)
    return open_online(options, flag=flag, tell=_is_first_rank())


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _training_paths(config: RunConfig) -> list[str]:
    paths = config.section(VideoConfig).video_data_path
    assert paths is not None, "`VideoConfig.own_errors` asks for them"
    return paths


def manifest_of(config: RunConfig) -> dict[str, Any]:
    """Return the manifest of the training data; for encoded clips, do not open their shards."""
    paths = _training_paths(config)
    if config.section(VideoConfig).online_encoding:
        return open_videos(config, paths).manifest
    blend = blend_of(paths)
    manifests = [read_manifest(Path(path)) for path in blend.paths]
    return manifests[0] if len(manifests) == 1 else joined_manifest(blend, manifests)


def null_text_of(config: RunConfig, manifest: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the empty caption's embeddings in the training data: ``[l, d]`` and pooled ``[e]``."""
    paths = _training_paths(config)
    if config.section(VideoConfig).online_encoding:
        return open_videos(config, paths).null_text
    return read_null(Path(blend_of(paths).paths[0]), manifest)


@dataclass(frozen=True)
class VideoSplit:
    """The clips of one split of the data, and the plan of the steps that read them.

    ``kind`` is "training" or "validation"; ``path`` is the value of ``--video-data-path`` or
    ``--video-valid-path``.
    """

    kind: str
    path: str
    clips: VideoClips
    plan: VideoPlan


def open_split(config: RunConfig, *, validates: bool = False) -> VideoSplit:
    """Open the clips of training or, with ``validates``, of validation, and plan their steps.

    Training shuffles clips by the seed. Validation takes all clips in order and mixes buckets, so
    that only the last step must be filled up.

    DataError or ConfigError is raised if the data cannot be used, has too few clips for a step, or
    has clips that do not fit the network.
    """
    video = config.section(VideoConfig)
    kind = "validation" if validates else "training"
    flag = "--video-valid-path" if validates else "--video-data-path"
    paths = (video.video_valid_path or []) if validates else _training_paths(config)
    name = f"The {kind} set (`{flag}` {' '.join(paths)})"
    clips = open_videos(config, paths)
    micro_batch_size, batch = config.training.batch_sizes
    replicas = config.parallel.data_parallel_size
    members = clips.members(micro_batch_size, name)
    per_step = batch // micro_batch_size
    mixed = video.mixed_buckets
    if mixed is None or validates:
        mixed = validates or must_mix(members, per_step)
    steps = BucketSteps(
        members,
        num_ranks=replicas,
        num_microbatches=per_step // replicas,
        seed=None if validates else config.training.seed,
        mixed=mixed,
        whole=validates,
        name=name,
    )
    network = network_of(config)
    geometries = {}
    noun = "Validation clips" if validates else "Clips"
    for bucket, group in members.items():
        shape = clips.latent_shape(group.clips[0])
        network.check_clips(shape[1:], f"{noun} of {bucket}")
        t, rows, columns = grid(shape[1:], network.patch_size)
        image = t * rows * columns
        text = network.padded_text(int(clips.manifest["text_length"]), image)
        geometries[bucket] = Geometry(shape, text, image)
    units = {str(b): [len(m.clips), m.micro_batch_size * per_step] for b, m in members.items()}
    deciding = [clips.manifest["fingerprint"], units, batch, config.training.seed]
    # Add this only if buckets are mixed, to keep the identity in checkpoints of other runs.
    deciding += ["mixed"] if mixed else []
    identity = hashlib.sha256(json.dumps(deciding).encode()).hexdigest()
    return VideoSplit(kind, " ".join(paths), clips, VideoPlan(steps, geometries, identity))


def build_video_datasets(
    config: RunConfig,
    assets: None,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Return the training and the validation split.

    Every rank needs both, to plan its steps. Only ``config`` is used.
    """
    train = open_split(config)
    valid = None
    if config.section(VideoConfig).video_valid_path is not None:
        valid = open_split(config, validates=True)
    return Datasets(train, valid, None)  # type: ignore[arg-type]


def prepare_video(config: RunConfig) -> tuple[RunConfig, None]:
    """Open and check the data; return (configuration completed by the data, None).

    None stands for the task's assets, such as a tokenizer, since video needs none. Data that is
    damaged or does not fit the flags raises ConfigError or DataError.
    """
    video = config.section(VideoConfig)
    if video.dry_run_shape is not None:
        return prepare_shape(config), None
    manifest = open_videos(config, _training_paths(config)).manifest
    if config.section(SampleConfig).sample_interval is not None:
        check_sampling(config)
    config = check_sizes(network_of(with_widths(config, manifest)).checked())
    weights = config.section(PublishedConfig).load_weights
    if weights is not None:
        check_codec_beside(weights, " ".join(_training_paths(config)), manifest)
    train = open_split(config)
    training = config.training.in_steps(train.plan.steps_per_epoch)
    optimizer = _with_warmup(config.optimizer, training)
    _check_references(config, train)
    if video.video_valid_path is not None:
        valid = open_split(config, validates=True)
        for name in ("codec", "text_encoder", "image_encoder"):
            if manifest.get(name) != valid.clips.manifest.get(name):
                raise ConfigError.about(
                    "--video-valid-path",
                    valid.path,
                    f"was encoded by another {name.replace('_', ' ')} than "
                    f"`--video-data-path` ({train.path})",
                    "preprocess both alike",
                )
        _check_references(config, valid)
    if _is_first_rank():
        if isinstance(train.clips, JoinedVideos):
            print(train.clips.table(), flush=True)
        print("\n".join([bucket_table(train), *starved_buckets(train)]), flush=True)
    longest = max(geometry.num_tokens for geometry in train.plan.geometries.values())
    model = dataclasses.replace(config.model, seq_length=longest, padded_vocab_size=None)
    # Validation always reads all of its data; without data there is none.
    evaluates = video.video_valid_path is not None and training.eval_iters > 0
    sizes = [x.micro_batch_size for x in train.clips.members(training.batch_sizes[0]).values()]
    training = dataclasses.replace(
        training,
        full_validation=evaluates,
        eval_iters=training.eval_iters if evaluates else 0,
        micro_batch_range=(min(sizes), max(sizes)),
    )
    return dataclasses.replace(config, model=model, training=training, optimizer=optimizer), None


def _with_warmup(given: OptimizerConfig, training: TrainingConfig) -> OptimizerConfig:
    """Return the optimizer flags ``given``, with a default warm-up if they have none.

    The default is the number of steps that the video task sets (``usual_warmup_iters``), or a tenth
    of the decay steps if the learning rate decays over no more steps than that. ConfigError is
    raised for flags that do not fit the number of steps.
    """
    optimizer = with_warmup(given, training)
    if optimizer != given and _is_first_rank():
        for note in optimizer.warmup_notes():
            print(f"> {note}", flush=True)
    errors = list(optimizer_errors(optimizer, training))
    if errors:
        raise ConfigError(errors)
    return optimizer


def _check_references(config: RunConfig, split: VideoSplit) -> None:
    """Raise ConfigError if the data lack given frames that a condition mode needs."""
    conditions = config.section(ConditionConfig)
    needs = network_of(config).needs
    has = other_fields(split.clips.manifest)
    for t in {geometry.shape[1] for geometry in split.plan.geometries.values()}:
        for mode in conditions.modes if t > 1 else ("t2v",):
            try:
                given = sections(mode, t, conditions)
            except DataError:
                continue  # Clips of this length never get this mode.
            needed = [section.name for section in given]
            if needs.masked:
                needed = [masked_name(mode, conditions)]
            if needs.image_places:
                needed += [image_field(section.side) for section in given]
            for name in needed:
                if name not in has:
                    raise ConfigError.about(
                        f"--{mode.replace('_', '-')}-weight",
                        conditions.weight(mode),
                        f"needs `{name}` of {'clips' if t > 1 else 'images'}, but the "
                        f"{split.kind} set has {', '.join(has) or 'none'}",
                        f"preprocess it with {remedy_for(name)}, or "
                        + ("set the weight to 0" if t > 1 else "leave out images"),
                    )


def planned_clips(config: RunConfig) -> list[Clip]:
    """Return, for the cost model, the shape and share of the clips of each trained bucket."""
    if config.section(VideoConfig).dry_run_shape is not None:
        return [clip_of_shape(config)]
    plan = open_split(config).plan
    patch = network_of(config).patch_size
    sizes = {bucket: group.micro_batch_size for bucket, group in plan.steps.buckets.items()}
    units = {
        bucket: (len(group.clips) - plan.steps.left_out[bucket]) // sizes[bucket]
        for bucket, group in plan.steps.buckets.items()
    }
    return [
        Clip(
            str(bucket),
            *grid(plan.geometries[bucket].shape[1:], patch),
            num_text=plan.geometries[bucket].num_text,
            micro_batch_size=sizes[bucket],
            share=count / sum(units.values()),
        )
        for bucket, count in sorted(units.items())
        if count
    ]


def bucket_table(split: VideoSplit) -> str:
    """Return a table of the buckets as text.

    Each line gives the bucket's number of clips, its micro-batch size, the number of clips that an
    epoch leaves out, and the number of tokens in a sequence.
    """
    steps = split.plan.steps
    lines = [
        f"  {bucket!s:28} {len(members.clips):8d} clips, micro-batches of "
        f"{members.micro_batch_size}, {steps.left_out[bucket]} left out of each epoch, sequences "
        f"of {split.plan.geometries[bucket].num_tokens} tokens"
        for bucket, members in sorted(steps.buckets.items(), key=lambda entry: entry[0])
    ]
    how = ", mixed within steps" if steps.mixed else ""
    return "\n".join([f"> buckets{how}, {steps.steps_per_epoch} steps an epoch:", *lines])


def starved_buckets(split: VideoSplit) -> list[str]:
    """Return a warning for each bucket that has too few clips ever to be trained."""
    steps = split.plan.steps
    if steps.mixed:
        unit = "a micro-batch"
        remedy = "give the bucket smaller micro-batches in `--video-buckets`, or more clips"
    else:
        unit = "a step of one bucket"
        remedy = "leave out `--no-mixed-buckets`, or give a smaller `--global-batch-size`"
    return [
        f"> warning: {bucket} has {len(steps.buckets[bucket].clips)} clip(s), which are never "
        f"trained: {unit} takes {size}; {remedy}"
        for bucket, size in sorted(steps.never_taken.items(), key=lambda entry: entry[0])
    ]


def _clips_of_steps(steps: BucketSteps, dp_rank: int, first_step: int) -> Iterator[list[int]]:
    """Yield, without end, the clips of one micro-batch after another of a data-parallel rank.

    Clips are indices into the dataset. The first micro-batch is the first one of ``first_step``.
    A micro-batch that lacks clips is completed by copies (`BucketSteps.filled`).
    """
    for step in itertools.count(first_step):
        for bucket, clips in steps.microbatches(step, dp_rank):
            yield steps.filled(bucket, clips)


def _on_all_ranks(batch: VideoBatch | None, device: torch.device, group: Any) -> VideoBatch:
    """Broadcast a batch from the first rank of a tensor-parallel group; return it on ``device``.

    ``batch`` is None on the other ranks.
    """
    tensors = {} if batch is None else batch.tensors()
    tensors = {name: to_device(tensor, device) for name, tensor in tensors.items()}
    if group.size() == 1:
        return VideoBatch.from_tensors(tensors)
    about: list[Any] = [{name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}]
    # The other ranks need the shapes first: clips differ in size, and short ones have fewer
    # references.
    torch.distributed.broadcast_object_list(about, group=group, group_src=0)
    for name, (shape, dtype) in about[0].items():
        if batch is None:
            tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        tensors[name] = tensors[name].contiguous()
        torch.distributed.broadcast(tensors[name], group=group, group_src=0)
    return VideoBatch.from_tensors(tensors)


EVALUATION_SEED = 1 << 32
"""A number added to the seed in validation, so that no clip gets the noise of a training clip."""


class VideoSource(BatchSource):
    """The batches of one split on this rank, grouped by step.

    In training, the first step is the one that the run has reached. Random numbers depend on the
    number of the sample in the run, so they are new in each epoch. In validation, chosen by
    ``full_epoch``, the first step is step 0. Random numbers depend on the index of the clip in the
    data, so every pass has the same.

    Args:
        split: the `VideoSplit` to read.
        consumed_samples: number of samples of all earlier steps.
    """

    def __init__(
        self, run: Run, split: Any, assets: None, consumed_samples: int, full_epoch: bool
    ) -> None:
        first_step = 0 if full_epoch else run.progress.iteration
        self.video_plan = split.plan
        super().__init__(None, len(split.clips), split.plan, first_step)
        self._context = run.context
        self._device = run.device
        self._training = not full_epoch
        self._consumed = consumed_samples
        network = network_of(run.config)
        training_config = run.config.training
        patch = network.patch_size
        num_workers = training_config.num_workers
        self._batches: Iterator[VideoBatch | None] = itertools.repeat(None)
        if run.context.tp_rank == 0:
            loader: Any = DataLoader(
                split.clips,
                batch_sampler=_clips_of_steps(split.plan.steps, run.context.dp_rank, first_step),
                num_workers=num_workers,
                collate_fn=partial(
                    collate,
                    patch=patch,
                    multiple=network.sequence_multiple,
                    zeros=network.masks_text,
                ),
                pin_memory=run.device.type == "cuda",
                # Without it the loader would draw a seed from torch's global generator, and ranks
                # without a loader would get out of step.
                generator=torch.Generator().manual_seed(0),
                multiprocessing_context=worker_context(num_workers),
                worker_init_fn=worker_setup(),
            )
            self._batches = iter(loader)
        null = Text(*(tensor[None].to(run.device) for tensor in split.clips.null_text))
        seed = training_config.seed + (EVALUATION_SEED if full_epoch else 0)
        self._build = network.builder(run.config, run.context, null, seed, patch)

    @property
    def coming(self) -> int:
        """Return the index of the next step, counted from the beginning of the run."""
        return self._coming

    def _next_batch(self) -> VideoBatch | None:
        try:
            return next(self._batches)
        except (DataError, MachineFault) as error:
            raise without_traceback(error) from None

    def next_step(
        self, num_microbatches: int, seq_length: int | None = None
    ) -> list[FlowMicrobatch]:
        """Return this rank's micro-batches of the next step.

        The plan decides how many there are and how long they are, so the arguments are unused.
        """
        context = self._context
        planned = self.video_plan.microbatches(self._coming, context.dp_rank, self._consumed)
        steps = self.video_plan.steps
        self._consumed += steps.num_samples(self._coming)
        self._coming += 1
        return [
            self._build(
                _on_all_ranks(self._next_batch(), self._device, context.pgs.tp),
                samples if self._training else steps.filled(bucket, clips),
                len(clips),
            )
            for bucket, clips, samples in planned
        ]


def video_step_stats(run: Run, num_microbatches: int) -> StepStats:
    """Return the numbers of clips, tokens and FLOPs of the next step on all ranks."""
    source = run.train_source
    assert isinstance(source, VideoSource)
    network = network_of(run.config)
    sequences = source.video_plan.sequences(source.coming)
    return StepStats(
        samples=len(sequences),
        tokens=sum(sequence.num_tokens for sequence in sequences),
        flops=sum(network.flops(x) for x in sequences),
    )
