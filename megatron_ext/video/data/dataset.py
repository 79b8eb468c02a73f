"""Datasets of clips, which are read from shards or encoded on access, and their micro-batches."""

from __future__ import annotations

import logging
import os
import sys
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_ext.errors import DataError
from megatron_ext.video.data.clips import list_folder, read_list
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.encode import (
    ClipEncoder,
    PlannedClip,
    VideoSample,
    check_codec,
    encoder_of,
    plan_clips,
    rate_report,
    report,
    sample_rate,
)
from megatron_ext.video.data.geometry import Bucket, BucketPlan
from megatron_ext.video.data.manifest import (
    buckets_of,
    make_manifest,
    read_manifest,
    sample_options,
)
from megatron_ext.video.data.options import VideoPreprocessOptions
from megatron_ext.video.data.register import read_register, row_keys
from megatron_ext.video.data.sampler import Members
from megatron_ext.video.data.shards import Shard, read_null

logger = logging.getLogger(__name__)


class VideoClips(Dataset[VideoSample], ABC):
    """The clips of a training run, read from shards or encoded on access.

    Attributes:
        manifest: the mapping that describes how latents and embeddings were made.
        plan: the bucket plan of this run, which gives the micro-batch size of each bucket. If it is
            None, the manifest gives these sizes.
        null_text: the encoded empty caption: token embeddings ``[l, d]`` and pooled ``[e]``.
        of_buckets: the indices of the clips in each bucket; buckets without clips are left out.
    """

    manifest: dict[str, Any]
    plan: BucketPlan | None
    null_text: tuple[Tensor, Tensor]
    of_buckets: dict[Bucket, list[int]]

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> VideoSample:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self._sample(number)

    @abstractmethod
    def _sample(self, number: int) -> VideoSample:
        """Return the clip with the index ``number``, which must be in ``range(len(self))``."""

    @abstractmethod
    def latent_shape(self, number: int) -> tuple[int, int, int, int]:
        """Return the shape (c, t, h, w) of the latents of clip ``number``."""

    @abstractmethod
    def file_of(self, number: int) -> str | None:
        """Return the path of the source file of clip ``number``; None if it is unknown."""

    def members(
        self, default_micro_batch_size: int, name: str = "The data"
    ) -> dict[Bucket, Members]:
        """Return the clips and the micro-batch size of each bucket.

        A bucket without a micro-batch size takes ``default_micro_batch_size``. DataError is raised
        if the plan lacks a bucket that has clips; the error message calls the data ``name``.
        """
        return {
            bucket: Members(clips, self._micro_batch_size(bucket, name) or default_micro_batch_size)
            for bucket, clips in self.of_buckets.items()
        }

    def _micro_batch_size(self, bucket: Bucket, name: str) -> int | None:
        if self.plan is None:
            entry = self.manifest["buckets"][buckets_of(self.manifest).index(bucket)]
            return entry["micro_batch_size"]  # type: ignore[no-any-return]
        try:
            return self.plan.rules[bucket.resolution][bucket.num_frames].micro_batch_size
        except KeyError:
            raise DataError(
                f"{name} holds clips of {bucket}, but the bucket plan has no {bucket.resolution} "
                f"of {bucket.num_frames} frames ({self.plan.as_json()}); add it."
            ) from None


class ShardedVideos(VideoClips):
    """The clips of a folder of shards that tools/preprocess_video.py has written.

    A missing or damaged file raises DataError.
    """

    def __init__(self, folder: str | os.PathLike[str], plan: BucketPlan | None = None) -> None:
        folder = Path(folder)
        self._folder = folder
        self.manifest = read_manifest(folder)
        self.plan = plan
        self.shards = [
            Shard(folder, shard["name"], self.manifest, shard["clips"])
            for shard in self.manifest["shards"]
        ]
        self._begins = np.cumsum([0, *(len(shard) for shard in self.shards)])
        self.null_text = read_null(folder, self.manifest)
        none = np.empty(0, np.int64)
        of_clips = np.concatenate([none, *(shard.buckets() for shard in self.shards)])
        numbered = enumerate(buckets_of(self.manifest))
        clips = {bucket: np.flatnonzero(of_clips == i).tolist() for i, bucket in numbered}
        self.of_buckets = {bucket: numbers for bucket, numbers in clips.items() if numbers}

    def __len__(self) -> int:
        return int(self._begins[-1])

    def _place(self, number: int) -> tuple[Shard, int]:
        """Return the shard that has the clip ``number``, and the clip's row in this shard."""
        shard = int(np.searchsorted(self._begins, number, side="right")) - 1
        return self.shards[shard], number - int(self._begins[shard])

    def _sample(self, number: int) -> VideoSample:
        shard, row = self._place(number)
        return shard.sample(row)

    def latent_shape(self, number: int) -> tuple[int, int, int, int]:
        shard, row = self._place(number)
        return shard.latent_shape(row)

    def file_of(self, number: int) -> str | None:
        shard, row = self._place(number)
        return self._files.get(shard.number_of(row))

    @cached_property
    def _files(self) -> dict[int, str]:
        """Return the paths of the source files, by the clip's number in the preprocessed list.

        The result is empty if the folder does not record them.
        """
        register = read_register(self._folder)
        return {entry.number: entry.path for entry in register.entries} if register else {}


class OnlineVideos(VideoClips):
    """Clips that are decoded and encoded on each access; nothing is stored.

    A clip has the same crop each time. One bad file does not end a long run: if the header of a
    file could be read but its frames cannot be decoded, a warning is logged, and the next clip of
    the same bucket is used instead. A loader with worker processes needs the patch codec and
    `HashedWords`, or models on the CPU, since processes cannot share models on a GPU.
    """

    def __init__(
        self,
        clips: Sequence[PlannedClip],
        encoder: ClipEncoder,
        plan: BucketPlan,
        manifest: Mapping[str, Any] | None = None,
    ) -> None:
        self._clips = list(clips)
        self._encoder = encoder
        self.plan = plan
        self.manifest = dict(manifest or {})
        self.of_buckets = {}
        for number, planned in enumerate(self._clips):
            self.of_buckets.setdefault(planned.bucket, []).append(number)

    def __len__(self) -> int:
        return len(self._clips)

    def _sample(self, number: int) -> VideoSample:
        same_bucket = self.of_buckets[self._clips[number].bucket]
        place = bisect_left(same_bucket, number)
        for other in same_bucket[place:] + same_bucket[:place]:
            try:
                return self._encoder.sample(self._clips[other])
            except DataError as error:
                logger.warning("Clip %d is replaced by the next of its bucket: %s", other, error)
        raise DataError(
            f"None of the {len(same_bucket)} clips of {self._clips[number].bucket} can be decoded; "
            "the warnings before name them; take them out of the list."
        )

    def latent_shape(self, number: int) -> tuple[int, int, int, int]:
        bucket = self._clips[number].bucket
        return self._encoder.codec.latent_shape(bucket.num_frames, bucket.height, bucket.width)

    def file_of(self, number: int) -> str | None:
        return self._clips[number].clip.path

    @cached_property
    def null_text(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        text, pooled = self._encoder.text_encoder.encode([""])
        return text[0], pooled[0]


@dataclass(frozen=True)
class VideoBatch:
    """The b clips of one micro-batch.

    Attributes:
        latents: ``[b, c, t, h, w]``.
        text: token embeddings ``[b, l, d]``, including padding rows.
        pooled: pooled text embeddings ``[b, e]``.
        references: latents ``[b, c, k, h, w]`` of k given frames, by names such as ``head1`` and
            ``masked_head1`` (`VideoSample.references`).
        image_embeds: the image encoder's output for some frames, ``[b, tokens, width]``, by "head",
            "tail" and "middle"; empty if the set has none.
    """

    latents: Tensor
    text: Tensor
    pooled: Tensor
    references: dict[str, Tensor]
    image_embeds: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name; references have names such as ``references/head1``."""
        named: dict[str, Tensor] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            inner = value if isinstance(value, dict) else None
            if inner is None:
                named[entry.name] = value
            else:
                named |= {f"{entry.name}/{name}": tensor for name, tensor in inner.items()}
        return named

    def pin_memory(self) -> VideoBatch:
        """Return a copy in pinned memory; torch's DataLoader calls this."""
        return self.from_tensors({k: t.pin_memory() for k, t in self.tensors().items()})

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> VideoBatch:
        """Build a batch from tensors by name, in the form that `VideoBatch.tensors` returns."""
        own: dict[str, Any] = {"references": {}}
        for name, tensor in tensors.items():
            entry, _, inner = name.partition("/")
            if inner:
                own.setdefault(entry, {})[inner] = tensor
            else:
                own[entry] = tensor
        return cls(**own)


def pad_text(text: Tensor, image_tokens: int, multiple: int, *, zeros: bool = False) -> Tensor:
    """Lengthen a text ``[..., l, d]`` until ``multiple`` divides l + image_tokens.

    Its last row is repeated or, with ``zeros``, rows of zeros are appended.
    """
    missing = -(text.size(-2) + image_tokens) % multiple
    last = torch.zeros_like(text[..., -1:, :]) if zeros else text[..., -1:, :]
    return torch.cat([text, last.expand(*last.shape[:-2], missing, last.size(-1))], dim=-2)


def collate(
    samples: Sequence[VideoSample], *, patch: int, multiple: int = 1, zeros: bool = False
) -> VideoBatch:
    """Stack clips of one bucket into a micro-batch.

    DataError is raised if the clips differ in their shapes, references or shapes of embeddings, or
    if height or width of the latents is not a multiple of ``patch``.

    Args:
        patch: side of the square patch of a token, in latent pixels.
        multiple: pad the text until the total number of text and image tokens of a clip is
            divisible by this.
        zeros: pad with rows of zeros, for a network that masks these, not with the last row.
    """
    shapes = {tuple(sample.latents.shape) for sample in samples}
    if len(shapes) != 1:
        raise DataError(
            f"The clips of a micro-batch have the shapes {sorted(shapes)}, but must be of one "
            "bucket; use the sampler of buckets."
        )
    _, t, h, w = shapes.pop()
    if h % patch or w % patch:
        raise DataError(
            f"Latents of {h} × {w} do not divide into patches of {patch} × {patch}; choose "
            "another patch size, codec or resolution."
        )
    alike: dict[str, list[Any]] = {
        "references": [
            sorted((n, tuple(p.shape)) for n, p in s.references.items()) for s in samples
        ],
        "image embeddings": [
            sorted((n, tuple(p.shape)) for n, p in s.image_embeds.items()) for s in samples
        ],
        "text embeddings": [(tuple(s.text.shape), tuple(s.pooled.shape)) for s in samples],
    }
    for what, values in alike.items():
        for differing in values:
            if differing != values[0]:
                raise DataError(
                    f"The clips of a micro-batch must have the same {what}, but have {values[0]} "
                    f"and {differing}; preprocess all of them with the same options."
                )
    text = torch.stack([sample.text for sample in samples])
    return VideoBatch(
        latents=torch.stack([sample.latents for sample in samples]),
        text=pad_text(text, t * (h // patch) * (w // patch), multiple, zeros=zeros),
        pooled=torch.stack([sample.pooled for sample in samples]),
        references={
            name: torch.stack([sample.references[name] for sample in samples])
            for name in samples[0].references
        },
        image_embeds={
            side: torch.stack([sample.image_embeds[side] for sample in samples])
            for side in samples[0].image_embeds
        },
    )


def open_online(options: VideoPreprocessOptions, *, flag: str, tell: bool) -> OnlineVideos:
    """Open the list of clips ``options.input``, to be encoded on access.

    Clips get the same buckets as in preprocessing with the same options. The header of every clip
    is read, and nothing is written. ``flag`` is the command-line flag that gives the list, for
    error messages. With ``tell``, print how many clips are left out, and why.
    """
    codec = build_codec(options.codec, seed=options.encode.clip_seed)
    check_codec(options.plan, codec, options.encode)

    def say(line: str) -> None:
        if tell:
            print(f"> {line}", file=sys.stderr)

    clips = read_list(options.input, say, flag=flag)
    planned, dropped = plan_clips(clips, options.plan, options.encode, workers=options.workers)
    for line in [*report(dropped, len(clips)), *rate_report(planned, options.encode)]:
        say(line)
    encoder = encoder_of(options, None, codec)
    keys = row_keys(clips, list_folder(options.input))
    manifest = make_manifest(
        sample_options(options, encoder),
        options.plan,
        sorted({p.bucket for p in planned}),
        [sample_rate(p, options.encode) for p in planned],
        [p.key(keys[p.number]) for p in planned],
    )
    return OnlineVideos(planned, encoder, options.plan, manifest)
