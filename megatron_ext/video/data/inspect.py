"""Inspects a dataset of encoded clips: buckets, frame rates, captions, repeated and bad samples."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_ext.data.indexed import byte_bar
from megatron_ext.video.config.encoding import PATCH
from megatron_ext.video.data.codecs import codec_from_manifest
from megatron_ext.video.data.dataset import ShardedVideos
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.data.shards import MANIFEST
from megatron_ext.video.data.similar import NearDuplicates

_NAMED = 5
"""The largest number of samples that a warning names."""


def is_video_set(path: Path) -> bool:
    """Tell whether a path is a folder that tools/preprocess_video.py has written."""
    return (path / MANIFEST).is_file()


@dataclass
class Inspected:
    """The report on a dataset: lines to print, and warnings."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def inspect_videos(
    folder: Path, *, micro_batch_size: int = 1, global_batch_size: int | None = None, scan: bool
) -> Inspected:
    """Report on a dataset of clips; DataError is raised if a file is missing or damaged.

    Args:
        micro_batch_size: micro-batch size of buckets for which the dataset gives none.
        global_batch_size: number of clips of a training step, to warn of each bucket that has too
            few clips for a step; None gives no such warnings.
        scan: whether to read all samples, to find bad values and duplicates.
    """
    videos = ShardedVideos(folder)
    report = Inspected()
    manifest = videos.manifest
    size = sum(x.stat().st_size for x in folder.glob("shard_*"))
    report.lines += [
        f"{folder}: {len(videos)} samples in {len(manifest['shards'])} shards, {size / 1e6:.1f} MB "
        f"as {manifest['storage']}",
        f"latents    {manifest['latent_channels']} channels of {manifest['codec']['codec']}",
        f"captions   {manifest['text_length']} rows of {manifest['text_width']} numbers of "
        f"{manifest['text_encoder']['text_encoder']}",
        f"references {', '.join(manifest['references']) or 'none'}",
    ]
    if (images := manifest.get("image_embeds")) is not None:
        report.lines.append(
            f"images     {', '.join(images['sides'])}: {images['tokens']} rows of "
            f"{images['width']} numbers of CLIP"
        )
    dropped = manifest.get("dropped") or {}
    if dropped:
        reasons = ", ".join(f"{count} {why}" for why, count in dropped.items())
        report.lines.append(f"dropped    {reasons} (each in {folder}/dropped.jsonl)")
    report.lines += _buckets(videos, micro_batch_size, global_batch_size, report.warnings)
    if scan and len(videos):
        _scan(videos, size, report)
    return report


def _buckets(
    videos: ShardedVideos,
    micro_batch_size: int,
    global_batch_size: int | None,
    warnings: list[str],
) -> Iterator[str]:
    """Yield a headline, and a line for each bucket: its clips, latent shape and micro-batches.

    ``micro_batch_size`` is for buckets for which the dataset gives none. If ``global_batch_size``
    is given, add to ``warnings`` a sentence for each bucket with too few clips for a training step.
    """
    yield "buckets"
    for bucket, members in sorted(videos.members(micro_batch_size).items()):
        count = len(members.clips)
        size = members.micro_batch_size
        _, t, h, w = videos.latent_shape(members.clips[0])
        yield (
            f"  {bucket!s:24} {count:8d} clips ({count / len(videos):.1%}), latents {t}x{h}x{w}, "
            f"{count // size} micro-batches of {size}"
        )
        if global_batch_size is not None:
            step = size * max(1, global_batch_size // micro_batch_size)
            if count < step:
                warnings.append(
                    f"{bucket} has {count} clips, but a step of its own takes {step}; give it more "
                    "clips, mix buckets (`--mixed-buckets`), or use a smaller --global-batch-size."
                )


def _scan(videos: ShardedVideos, size: int, report: Inspected) -> None:
    """Read all samples, and add to ``report`` what this shows.

    The report gets lines on frame rates and captions, and warnings of duplicates and bad values.
    ``size``, the number of bytes of the dataset, is for the progress bar.
    """
    rates = Counter[int]()
    words = list[int]()
    same: dict[bytes, list[int]] = {}
    no_caption = list[int]()
    bad = list[int]()
    total, squares, count = 0.0, 0.0, 0
    buckets = {x: bucket for bucket, numbers in videos.of_buckets.items() for x in numbers}
    # Comparing frames is better than comparing latents, but decoding by a VAE would take too long.
    is_patch = videos.manifest["codec"]["codec"] == PATCH
    codec = codec_from_manifest(videos.manifest) if is_patch else None
    looks = NearDuplicates()
    with byte_bar("Reading samples", size) as bar:
        for number in range(len(videos)):
            sample = videos[number]
            latents = sample.latents.double()
            bar.update(sample.latents.nbytes + sample.text.nbytes)
            rates[sample.fps] += 1
            words.append(len(sample.caption.split()))
            if not words[-1]:
                no_caption.append(number)
            given = (*sample.references.values(), *sample.image_embeds.values())
            if not all(x.isfinite().all() for x in (latents, sample.text, sample.pooled, *given)):
                bad.append(number)
                continue
            plain = sample.latents.float()
            looks.add(number, plain if codec is None else codec.decode(plain[None])[0])
            total += float(latents.sum())
            squares += float(latents.square().sum())
            count += latents.numel()
            same.setdefault(_digest(sample.latents, buckets[number]), []).append(number)
    shown = ", ".join(
        f"{fps} ({n})" if fps else f"pictures ({n})" for fps, n in rates.most_common()
    )
    report.lines.append(f"rates      frames per second (samples): {shown}")
    words.sort()
    middle = words[len(words) // 2]
    report.lines.append(
        f"words      of a caption: {words[0]} to {words[-1]}, half have {middle} or more"
    )
    if count:
        mean = total / count
        deviation = max(squares / count - mean * mean, 0.0) ** 0.5
        report.lines.append(f"numbers    of latents: mean {mean:.4g}, deviation {deviation:.4g}")
    twice = [numbers for numbers in same.values() if len(numbers) > 1]
    surplus = sum(len(numbers) - 1 for numbers in twice)
    report.lines.append(f"repeated   {surplus} samples have the latents of another one")
    digest_of = {x: digest for digest, numbers in same.items() for x in numbers}
    alike = [(a, b) for a, b in looks.pairs() if digest_of[a] != digest_of[b]]
    report.lines.append(f"alike      {len(alike)} more look like another one")
    if alike:
        which = "; ".join(f"{b} as {a}: {videos[b].caption!r:.60}" for a, b in alike[:_NAMED])
        report.warnings.append(f"{len(alike)} samples look like another one. First: {which}")
    for what, numbers in (
        ("have the latents of another one", [numbers[1] for numbers in twice]),
        ("have no caption", no_caption),
        ("have numbers that are not finite, so that a run would end", bad),
    ):
        if numbers:
            which = "; ".join(f"{x}: {videos[x].caption!r:.60}" for x in numbers[:_NAMED])
            report.warnings.append(f"{len(numbers)} samples {what}. First: {which}")


def _digest(latents: torch.Tensor, bucket: Bucket) -> bytes:
    """Return a hash of latents and of their bucket, which tells their shape."""
    values = latents.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(str(bucket).encode() + values, digest_size=16).digest()
