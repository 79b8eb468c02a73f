"""Clips and captions to shards: planned, encoded by worker processes, published at the end.

A killed run keeps its finished shards: the same command goes on after them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from megatron_ext.errors import ConfigError, DataError, MegatronExtError, say_to_stderr
from megatron_ext.video.data import shards
from megatron_ext.video.data.clips import read_list
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.encode import (
    ClipEncoder,
    Dropped,
    PlannedClip,
    check_codec,
    plan_clips,
    reference_names,
    report,
)
from megatron_ext.video.data.geometry import Drop
from megatron_ext.video.data.manifest import finished, make_manifest, refuse_other_data, sweep
from megatron_ext.video.data.preprocess_options import VideoPreprocessOptions, parse_options
from megatron_ext.video.data.text_encoders import build_text_encoder

Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """Figures of a finished run.

    Attributes:
        clips: clips in the dataset.
        dropped: clips that were left out, with reasons.
        shards: sets of files written or found finished.
        resumed: shards that an earlier run had finished.
        seconds: time of this run.
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
    """Encode a list of clips into a dataset.

    Raises:
        ConfigError, DataError: one sentence each; finished shards are kept for the next try.
    """
    start = time.monotonic()
    folder, device = Path(options.output), torch.device(options.device)
    codec = build_codec(options.codec, device, options.encode.clip_seed)
    check_codec(options.plan, codec, options.encode.reference_lengths)
    clips = read_list(options.input)
    planned, dropped = plan_clips(
        clips, options.plan, options.encode, workers=options.workers,
        tick=_ticker("Looked at", len(clips), say),
    )  # fmt: skip
    text_encoder = build_text_encoder(options.text_encoder, device)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0), _one_thread():
            manifest = make_manifest(options, clips, planned, codec, text_encoder)
            refuse_other_data(folder, manifest["fingerprint"])
            sweep(folder)
            null = text_encoder.encode([""])
            shards.write_null(folder, null[0][0], null[1][0], options.storage)
            parts = list(_parts(planned, options.clips_per_shard, manifest["buckets"]))
            encoders = [ClipEncoder(options.encode, codec, text_encoder)]
            # Worker processes load their own models: the list is emptied before they start, and
            # must hold the only reference.
            del codec, text_encoder
            done = _encode_parts(options, encoders, parts, manifest, say)
            dropped = sorted(dropped + done.dropped, key=lambda drop: drop.number)
            _publish(folder, manifest, parts, done, dropped)
    except Timeout:
        raise DataError(
            f"`--output` ({folder}) is being written by another run; wait for it, or give another "
            "folder."
        ) from None
    except OSError as error:
        raise DataError(
            f"`--output` ({folder}) cannot be written ({error}); finished shards are kept, so mend "
            "this and run the same command again, or give another folder."
        ) from error
    for line in report(dropped, len(clips)):
        say(line)
    return Report(
        sum(done.kept.values()), dropped, len(parts), done.resumed, time.monotonic() - start
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Encode as worker processes do: sums in another order would give other bytes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _ticker(what: str, total: int, say: Say) -> Callable[[int], None]:
    """Return a function that says how far a run is, every five seconds at most."""
    start = time.monotonic()
    last = [start]

    def tick(done: int) -> None:
        now = time.monotonic()
        if now - last[0] >= 5:
            last[0] = now
            left = (total - done) * (now - start) / max(done, 1)
            say(f"{what} {done} of {total} clips, {done / (now - start):.1f}/s, ETA {left:.0f} s")

    return tick


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


def _encode_parts(
    options: VideoPreprocessOptions,
    encoders: list[ClipEncoder],
    parts: Sequence[_Part],
    manifest: dict[str, Any],
    say: Say,
) -> _Done:
    done, todo = _Done(), []
    for part in parts:
        marker = finished(Path(options.output), part.name, len(part.clips), manifest)
        if marker is None:
            todo.append(part)
        else:
            done.take(marker)
    done.resumed = len(parts) - len(todo)
    if done.resumed:
        say(f"{done.resumed} of {len(parts)} shards were finished before.")
    tick = _ticker("Encoded", sum(len(part.clips) for part in todo), say)
    encoded = 0
    for marker in _markers(options, encoders, todo, manifest["fingerprint"]):
        done.take(marker)
        encoded += marker["clips"] + len(marker["dropped"])
        tick(encoded)
    return done


def _markers(
    options: VideoPreprocessOptions,
    encoders: list[ClipEncoder],
    todo: Sequence[_Part],
    fingerprint: str,
) -> Iterator[dict[str, Any]]:
    """Yield the markers of shards as they are finished, by the first encoder or by worker
    processes.
    """
    if options.workers == 1 or len(todo) <= 1:
        for part in todo:
            yield write_shard(encoders[0], options, part, fingerprint)
        return
    encoders.clear()
    if options.device == "cuda":
        torch.cuda.empty_cache()
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
    codec = build_codec(options.codec, place, options.encode.clip_seed)
    return ClipEncoder(options.encode, codec, build_text_encoder(options.text_encoder, place))


def write_shard(
    encoder: ClipEncoder, options: VideoPreprocessOptions, part: _Part, fingerprint: str
) -> dict[str, Any]:
    """Encode the clips of one shard; its marker names those that cannot be decoded."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Returns:
        The exit code: 0, 1 for bad input, 2 for bad flags, 130 when interrupted.
    """
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv)
        done = preprocess(options)
    except KeyboardInterrupt:
        say_to_stderr("Interrupted; finished shards are kept, so run the same command again.")
        return 130
    except MegatronExtError as error:
        for sentence in error.messages:
            say_to_stderr(f"error: {sentence}")
        return 2 if isinstance(error, ConfigError) else 1
    say_to_stderr(
        f"{done.clips} clips in {done.shards} shards, {len(done.dropped)} dropped, in "
        f"{done.seconds:.1f} s -> {options.output}"
    )
    return 0
