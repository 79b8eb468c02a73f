"""What identifies a preprocessed dataset, and what of an earlier try can be kept."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ext.data.video import shards
from megatron_ext.data.video.assign import subsampling
from megatron_ext.data.video.clips import Clip
from megatron_ext.data.video.codec_base import VideoCodec
from megatron_ext.data.video.encode import PlannedClip, reference_names
from megatron_ext.data.video.options import VideoPreprocessOptions
from megatron_ext.data.video.text_encoders import TextEncoder
from megatron_ext.errors import DataError


def make_manifest(
    options: VideoPreprocessOptions,
    clips: Sequence[Clip],
    planned: Sequence[PlannedClip],
    codec: VideoCodec,
    text_encoder: TextEncoder,
) -> dict[str, Any]:
    """All of the manifest that is known before encoding."""
    buckets = [
        {
            "shape": asdict(bucket),
            "micro_batch_size": options.plan.rules[bucket.resolution][
                bucket.num_frames
            ].micro_batch_size,
        }
        for bucket in sorted({p.bucket for p in planned})
    ]
    about = {
        "format": shards.FORMAT,
        "codec": codec.identity,
        "text_encoder": text_encoder.identity,
        "encode": asdict(options.encode),
        "plan": options.plan.as_dict(),
        "buckets": buckets,
        "fps": _usual_rate(planned, options.encode.fps_cap),
        "storage": options.storage,
        "references": list(reference_names(options.encode.reference_lengths)),
        "latent_channels": codec.channels,
        "text_length": text_encoder.length,
        "text_width": text_encoder.width,
        "pooled_width": text_encoder.pooled_width,
    }
    inputs = [[asdict(clip), *_stamp(clip.path)] for clip in clips]
    models = [options.codec.codec, options.text_encoder.t5_path, options.text_encoder.clip_path]
    weights = [_stamp(path) for model in models if model for path in _files(Path(model))]
    deciding = json.dumps([about, options.clips_per_shard, inputs, weights], sort_keys=True)
    return {**about, "fingerprint": hashlib.sha256(deciding.encode()).hexdigest()}


def _usual_rate(planned: Sequence[PlannedClip], fps_cap: int) -> int:
    """Frames per second of most videos, which samples take too; 24 where there are only images."""
    rates = [subsampling(p.shape.fps, fps_cap)[1] for p in planned if p.bucket.num_frames > 1]
    return Counter(rates).most_common(1)[0][0] if rates else 24


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _stamp(path: str | Path) -> list[int]:
    try:
        stat = os.stat(path)
    except OSError:
        return []
    return [stat.st_size, stat.st_mtime_ns]


def refuse_other_data(folder: Path, fingerprint: str) -> None:
    """Neither a dataset nor the finished shards of a killed run are overwritten by another.

    Raises:
        DataError: the folder holds some.
    """
    for path in [folder / "manifest.json", *sorted(folder.glob("shard_*.json"))]:
        if path.exists() and shards.read_json(path).get("fingerprint") != fingerprint:
            raise DataError(
                f"`--output` ({folder}) holds a dataset of other clips or options ({path.name}); "
                "give another folder, or remove it first."
            )


def sweep(folder: Path) -> None:
    """Removes what killed runs left half written; the caller holds the folder's lock."""
    for path in folder.glob("*.writing.*"):
        path.unlink()


def finished(
    folder: Path, name: str, num_clips: int, manifest: dict[str, Any]
) -> dict[str, Any] | None:
    """The marker of a shard that an earlier try of the same run finished, if its files are whole.

    Args:
        folder: of the dataset.
        name: of the shard.
        num_clips: that were planned for it.
        manifest: of `make_manifest`.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    try:
        marker = shards.read_json(path)
        shards.Shard(folder, name, manifest, int(marker["clips"]))
    except (DataError, KeyError):
        return None
    whole = marker["clips"] + len(marker["dropped"]) == num_clips
    return marker if whole and marker.get("fingerprint") == manifest["fingerprint"] else None
