"""Clips and captions to shards: planned, encoded by worker processes, published at the end.

A killed run keeps its finished shards: the same command goes on after them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from megatron_ext.data.preprocess.run import say_to_stderr
from megatron_ext.data.video import shards
from megatron_ext.data.video.assign import Drop
from megatron_ext.data.video.clips import Clip, read_list
from megatron_ext.data.video.codecs import build_codec
from megatron_ext.data.video.encode import (
    ClipEncoder,
    PlannedClip,
    reference_names,
)
from megatron_ext.data.video.options import VideoPreprocessOptions
from megatron_ext.data.video.planning import Dropped, check_codec, plan_clips, report
from megatron_ext.data.video.text_encoders import build_text_encoder
from megatron_ext.errors import DataError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """What a run did.

    Attributes:
        clips: in the dataset.
        dropped: with reasons.
        shards: files sets written or found finished.
        resumed: shards that an earlier run had finished.
        seconds: of this run.
    """

    clips: int
    dropped: list[Dropped]
    shards: int
    resumed: int
    seconds: float


@dataclass(frozen=True)
class _Part:
    """The clips of one shard, and the number of each one's bucket."""

    name: str
    clips: list[PlannedClip]
    buckets: list[int]


def preprocess(options: VideoPreprocessOptions, say: Say = say_to_stderr) -> Report:
    """Encodes a list of clips into a dataset.

    Raises:
        ConfigError, DataError: one sentence each; finished shards are kept for the next try.
    """
    start = time.monotonic()
    codec = build_codec(options.codec)
    check_codec(options.plan, codec)
    clips = read_list(options.input)
    planned, dropped = plan_clips(
        clips, options.plan, options.encode, workers=options.workers,
        tick=_ticker("Looked at", len(clips), say),
    )  # fmt: skip
    text_encoder = build_text_encoder(options.text_encoder)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            manifest = _manifest(options, clips, planned, codec, text_encoder)
            _refuse_other_data(folder, manifest["fingerprint"])
            null = text_encoder.encode([""])
            shards.write_null(folder, null[0][0], null[1][0], options.storage)
            parts = list(_parts(planned, options.clips_per_shard, manifest["buckets"]))
            done = _encode_parts(options, parts, manifest["fingerprint"], say)
            dropped = sorted(dropped + done.dropped, key=lambda drop: drop.number)
            _publish(folder, manifest, parts, done, dropped)
    except Timeout:
        raise DataError(
            f"`--output` ({folder}) is being written by another run; wait for it, or give another "
            "folder."
        ) from None
    for line in report(dropped, len(clips)):
        say(line)
    return Report(
        sum(done.kept.values()), dropped, len(parts), done.resumed, time.monotonic() - start
    )


def _ticker(what: str, total: int, say: Say) -> Callable[[int], None]:
    """Says now and then how far a run is, every five seconds at most."""
    start = time.monotonic()
    last = [start]

    def tick(done: int) -> None:
        now = time.monotonic()
        if now - last[0] >= 5:
            last[0] = now
            left = (total - done) * (now - start) / max(done, 1)
            say(f"{what} {done} of {total} clips, {done / (now - start):.1f}/s, ETA {left:.0f} s")

    return tick


def _manifest(
    options: VideoPreprocessOptions,
    clips: Sequence[Clip],
    planned: Sequence[PlannedClip],
    codec: Any,
    text_encoder: Any,
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
        "storage": options.storage,
        "references": list(reference_names(options.encode.reference_lengths)),
        "latent_channels": codec.channels,
        "text_length": text_encoder.length,
        "text_width": text_encoder.width,
        "pooled_width": text_encoder.pooled_width,
    }
    inputs = [[asdict(clip), *_stamp(clip.path)] for clip in clips]
    deciding = json.dumps([about, options.clips_per_shard, inputs], sort_keys=True)
    return {**about, "fingerprint": hashlib.sha256(deciding.encode()).hexdigest()}


def _stamp(path: str) -> list[int]:
    try:
        stat = os.stat(path)
    except OSError:
        return []
    return [stat.st_size, stat.st_mtime_ns]


def _refuse_other_data(folder: Path, fingerprint: str) -> None:
    """A finished dataset is never overwritten by another."""
    path = folder / "manifest.json"
    if path.exists() and shards.read_json(path).get("fingerprint") != fingerprint:
        raise DataError(
            f"`--output` ({folder}) holds a dataset of other clips or options; give another "
            "folder, or remove it first."
        )


def _parts(
    planned: Sequence[PlannedClip], size: int, buckets: Sequence[dict[str, Any]]
) -> Iterator[_Part]:
    numbers = {json.dumps(entry["shape"]): i for i, entry in enumerate(buckets)}
    for start in range(0, len(planned), size):
        clips = list(planned[start : start + size])
        of_clips = [numbers[json.dumps(asdict(p.bucket))] for p in clips]
        yield _Part(shards.shard_name(start // size), clips, of_clips)


@dataclass
class _Done:
    kept: dict[str, int] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    resumed: int = 0

    def take(self, marker: dict[str, Any]) -> None:
        self.kept[marker["name"]] = marker["clips"]
        self.dropped += [
            Dropped(n, path, Drop.UNREADABLE, detail) for n, path, detail in marker["dropped"]
        ]


def _finished(folder: Path, part: _Part, fingerprint: str) -> dict[str, Any] | None:
    """The marker of a shard that an earlier try of the same run finished."""
    path = folder / f"{part.name}.json"
    if not path.exists():
        return None
    marker = shards.read_json(path)
    return marker if marker.get("fingerprint") == fingerprint else None


def _encode_parts(
    options: VideoPreprocessOptions, parts: Sequence[_Part], fingerprint: str, say: Say
) -> _Done:
    done, todo = _Done(), []
    for part in parts:
        marker = _finished(Path(options.output), part, fingerprint)
        if marker is None:
            todo.append(part)
        else:
            done.take(marker)
    done.resumed = len(parts) - len(todo)
    if done.resumed:
        say(f"{done.resumed} of {len(parts)} shards were finished before.")
    tick = _ticker("Encoded", sum(len(part.clips) for part in todo), say)
    encoded = 0
    for marker in _markers(options, todo, fingerprint):
        done.take(marker)
        encoded += marker["clips"] + len(marker["dropped"])
        tick(encoded)
    return done


def _markers(
    options: VideoPreprocessOptions, todo: Sequence[_Part], fingerprint: str
) -> Iterator[dict[str, Any]]:
    """Markers of shards as they are finished."""
    if options.workers == 1 or len(todo) <= 1:
        encoder = _encoder(options, options.device)
        for part in todo:
            yield write_shard(encoder, options, part, fingerprint)
        return
    context = multiprocessing.get_context("spawn")
    size = min(options.workers, len(todo))
    counter = context.Value("i", 0)
    pool = ProcessPoolExecutor(size, context, _start_worker, (options, counter))
    try:
        futures = [pool.submit(_work, part, fingerprint) for part in todo]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        raise DataError(
            "A worker process ended (out of memory, or killed); finished shards are kept, so run "
            "the same command again, with fewer `--workers`."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_OF_THIS_WORKER: list[tuple[ClipEncoder, VideoPreprocessOptions]] = []


def _start_worker(options: VideoPreprocessOptions, counter: Any) -> None:
    torch.set_num_threads(1)
    device = options.device
    if device == "cuda":
        with counter.get_lock():
            device = f"cuda:{counter.value % torch.cuda.device_count()}"
            counter.value += 1
    _OF_THIS_WORKER.append((_encoder(options, device), options))


def _work(part: _Part, fingerprint: str) -> dict[str, Any]:
    encoder, options = _OF_THIS_WORKER[0]
    return write_shard(encoder, options, part, fingerprint)


def _encoder(options: VideoPreprocessOptions, device: str) -> ClipEncoder:
    place = torch.device(device)
    codec = build_codec(options.codec, place, options.encode.seed)
    return ClipEncoder(options.encode, codec, build_text_encoder(options.text_encoder, place))


def write_shard(
    encoder: ClipEncoder, options: VideoPreprocessOptions, part: _Part, fingerprint: str
) -> dict[str, Any]:
    """Encodes the clips of one shard; those that cannot be decoded are named in its marker."""
    folder = Path(options.output)
    names = reference_names(options.encode.reference_lengths)
    bad, kept = [], 0
    with shards.ShardWriter(folder, part.name, names, options.storage) as writer:
        for planned, bucket in zip(part.clips, part.buckets, strict=True):
            try:
                sample = encoder.sample(planned)
            except DataError as error:
                bad.append([planned.number, planned.clip.path, str(error)])
                continue
            writer.add(sample, bucket)
            kept += 1
    marker = {
        "format": shards.FORMAT, "name": part.name, "fingerprint": fingerprint,
        "clips": kept, "dropped": bad,
    }  # fmt: skip
    shards.write_json(folder / f"{part.name}.json", marker)
    return marker


def _publish(
    folder: Path,
    manifest: dict[str, Any],
    parts: Sequence[_Part],
    done: _Done,
    dropped: Sequence[Dropped],
) -> None:
    if not any(done.kept.values()):
        raise DataError(
            f"None of the {sum(len(part.clips) for part in parts)} planned clips could be decoded; "
            f"the first: {done.dropped[0].detail}"
        )
    lines = [json.dumps({**asdict(d), "reason": d.reason.value}) + "\n" for d in dropped]
    temporary = folder / f"dropped.jsonl.writing.{os.getpid()}"
    temporary.write_text("".join(lines), encoding="utf-8")
    os.replace(temporary, folder / "dropped.jsonl")
    counts = Counter(d.reason.value for d in dropped)
    content = {
        **manifest,
        "shards": [{"name": part.name, "clips": done.kept[part.name]} for part in parts],
        "dropped": dict(counts),
    }
    shards.write_json(folder / "manifest.json", content)
