"""Combines several sets of clips in one run, by weights, and checks that they fit together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.data.blend import Blend
from megatron_ext.video.data.dataset import VideoClips
from megatron_ext.video.data.encode import VideoSample
from megatron_ext.video.data.geometry import Bucket, BucketPlan
from megatron_ext.video.data.manifest import buckets_of
from megatron_ext.video.data.sampler import Members

_ALIKE = (
    "codec",
    "text_encoder",
    "storage",
    "references",
    "latent_channels",
    "text_length",
    "text_width",
    "pooled_width",
    "image_encoder",
    "image_embeds",
    "latents",
)
"""Entries of the manifest that must be equal in all sets of a run."""
_NEWER = ("latents",)
"""The entries of `_ALIKE` that sets of earlier versions lack, although they would be equal."""


def joined_manifest(
    blend: Blend, manifests: Sequence[dict[str, Any]], flag: str = "--video-data-path"
) -> dict[str, Any]:
    """Return a manifest for all sets: that of the first set, with the buckets of all sets.

    ConfigError is raised if sets were encoded by different models, or differ in the micro-batch
    size of a bucket.
    """
    first = manifests[0]
    for path, manifest in zip(blend.paths, manifests, strict=True):
        for name in _ALIKE:
            own = manifest.get(name)
            other = first.get(name)
            if own == other or (name in _NEWER and None in (own, other)):
                continue
            raise ConfigError.about(
                flag,
                path,
                f"has `{name}` {_short(own)}, but {blend.paths[0]} has {_short(other)}",
                "preprocess both alike",
            )
    sizes: dict[Bucket, Any] = {}
    for path, manifest in zip(blend.paths, manifests, strict=True):
        for bucket, entry in zip(buckets_of(manifest), manifest["buckets"], strict=True):
            size = entry["micro_batch_size"]
            if sizes.setdefault(bucket, size) != size:
                raise ConfigError.about(
                    flag,
                    path,
                    f"has micro-batches of {size} for {bucket}, but another set has "
                    f"{sizes[bucket]}",
                    "give `--video-buckets` with one of them",
                )
    deciding = [[m["fingerprint"] for m in manifests], blend.weights, blend.repeats]
    return {
        **first,
        "buckets": [
            {"shape": vars(bucket), "micro_batch_size": size} for bucket, size in sizes.items()
        ],
        "fingerprint": hashlib.sha256(json.dumps(deciding).encode()).hexdigest(),
    }


def _short(value: Any) -> str:
    return json.dumps(value)[:200]


class JoinedVideos(VideoClips):
    """The clips of several sets, one set after another in the order of the blend."""

    def __init__(
        self, blend: Blend, sets: Sequence[VideoClips], plan: BucketPlan | None, flag: str
    ) -> None:
        self.blend = blend
        self._sets = list(sets)
        self.plan = plan
        manifests = [one.manifest for one in sets]
        if plan is not None:
            # The plan replaces the micro-batch sizes of the sets, so these may differ.
            manifests = [{**m, "buckets": _without_sizes(m)} for m in manifests]
        self.manifest = joined_manifest(blend, manifests, flag)
        self._begins = np.cumsum([0, *map(len, sets)])
        self.passes = blend.passes([len(one) for one in sets])
        self.of_buckets = {}
        for bucket in buckets_of(self.manifest):
            numbers = [x for place in range(len(sets)) for x in self._numbers(place, bucket)]
            if numbers:
                self.of_buckets[bucket] = numbers

    def _numbers(self, place: int, bucket: Bucket) -> list[int]:
        """Return the clips of a bucket in the set with index ``place``.

        Clips are given by their numbers in the joined data, not by those in the set.
        """
        begin = int(self._begins[place])
        return [begin + number for number in self._sets[place].of_buckets.get(bucket, ())]

    def __len__(self) -> int:
        return int(self._begins[-1])

    def _place(self, number: int) -> tuple[VideoClips, int]:
        place = int(np.searchsorted(self._begins, number, side="right")) - 1
        return self._sets[place], number - int(self._begins[place])

    def _sample(self, number: int) -> VideoSample:
        clips, own = self._place(number)
        return clips[own]

    def latent_shape(self, number: int) -> tuple[int, int, int, int]:
        clips, own = self._place(number)
        return clips.latent_shape(own)

    def file_of(self, number: int) -> str | None:
        clips, own = self._place(number)
        return clips.file_of(own)

    @property
    def null_text(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self._sets[0].null_text

    def members(
        self, default_micro_batch_size: int, name: str = "The data"
    ) -> dict[Bucket, Members]:
        """Return, by bucket, the clips that an epoch takes from each set, and the micro-batch size.

        A bucket without a micro-batch size takes ``default_micro_batch_size``. DataError is raised
        if ``--video-buckets`` is given, but lacks a bucket that has clips; the error message calls
        the data ``name``.
        """
        members = {}
        for bucket, alone in super().members(default_micro_batch_size, name).items():
            shares = []
            for place, passes in enumerate(self.passes):
                numbers = self._numbers(place, bucket)
                shares.append((numbers, round(passes * len(numbers))))
            if any(count for _, count in shares):
                members[bucket] = Members.of_shares(shares, alone.micro_batch_size)
        return members

    def table(self) -> str:
        """Return a text with a line for each set: its clips, and how often an epoch reads it."""
        whole = sum(p * len(one) for p, one in zip(self.passes, self._sets, strict=True))
        lines = ["> sets of clips:"]
        for path, passes, one in zip(self.blend.paths, self.passes, self._sets, strict=True):
            share = float(passes * len(one) / whole)
            times = f"{float(passes):.3g} times an epoch, {share:.1%} of the samples"
            lines.append(f"  {path}: {len(one)} clips, {times}")
        encode = self._sets[0].manifest.get("encode", {})
        for path, one in zip(self.blend.paths, self._sets, strict=True):
            own = one.manifest.get("encode", {})
            other = [f"`{k}`" for k in {**encode, **own} if own.get(k) != encode.get(k)]
            if other:
                lines.append(
                    f"  {path} was encoded with other {', '.join(other)} than "
                    f"{self.blend.paths[0]}, which sampling follows"
                )
        return "\n".join(lines)


def _without_sizes(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**entry, "micro_batch_size": None} for entry in manifest["buckets"]]


def check_not_empty(blend: Blend, sets: Sequence[VideoClips], flag: str) -> None:
    """Raise DataError for a set without clips, which cannot give its share of samples."""
    for path, one in zip(blend.paths, sets, strict=True):
        if not len(one):
            raise DataError(f"{path} holds no clips; leave it out of `{flag}`.")
