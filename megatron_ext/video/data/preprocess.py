"""Turns clips and captions into a dataset of shards, encoded in one or more processes.

A killed run keeps its finished shards, and the same command resumes after them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from filelock import FileLock, Timeout

from megatron_ext import limits
from megatron_ext.config.flags import flags_of
from megatron_ext.disk.reading import UnreadableFile, read_text
from megatron_ext.disk.writing import lock_path, write_text
from megatron_ext.errors import (
    ConfigError,
    DataError,
    MegatronExtError,
    end_with_parent,
    held_signals,
    release_signals,
    say_to_stderr,
)
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig, TextEncoderConfig
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
    slow_clips,
)
from megatron_ext.video.data.geometry import Bucket, Drop, parse_plan
from megatron_ext.video.data.manifest import (
    VideoPreprocessOptions,
    buckets_of,
    finished,
    make_manifest,
    refuse_other_data,
)
from megatron_ext.video.data.text_encoders import build_text_encoder

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Part:
    """The clips of one shard, and the number of each clip's bucket in the manifest."""

    name: str
    clips: list[PlannedClip]
    buckets: list[int]


def preprocess(options: VideoPreprocessOptions, say: Say = say_to_stderr) -> None:
    """Encode a list of clips into a dataset; an error leaves the finished shards in place."""
    start = time.monotonic()
    folder, device = Path(options.output), torch.device(options.device)
    codec = build_codec(options.codec, device, options.encode.clip_seed)
    check_codec(options.plan, codec, options.encode.reference_lengths)
    clips = read_list(options.input, say)
    planned, dropped = plan_clips(
        clips, options.plan, options.encode, workers=options.workers,
        tick=_ticker("Looked at", len(clips), say),
    )  # fmt: skip
    text_encoder = build_text_encoder(options.text_encoder, device)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(lock_path(folder / ".lock"), timeout=0), ExitStack() as stack:
            # As in worker processes: sums in another order would give other bytes.
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            manifest = make_manifest(options, clips, planned, codec, text_encoder)
            refuse_other_data(folder, manifest["fingerprint"])
            for half_written in folder.glob("*.writing.*"):
                half_written.unlink()
            null = text_encoder.encode([""])
            shards.write_null(folder, null[0][0], null[1][0], options.storage)
            parts = _parts(planned, options.clips_per_shard, buckets_of(manifest))
            encoders = [ClipEncoder(options.encode, codec, text_encoder)]
            # Worker processes load their own models: the list is emptied before they start, and
            # must hold the only reference.
            del codec, text_encoder
            markers = _encode_parts(options, encoders, parts, manifest, say)
            _publish(folder, manifest, parts, markers, dropped)
    except Timeout:
        raise DataError(
            f"`--output` ({folder}) is being written by another run; wait for it, or give another "
            "folder."
        ) from None
    except OSError as error:
        raise DataError(
            f"`--output` ({folder}) cannot be written ({limits.cause(error, folder)}); finished "
            "shards are kept, so mend this and run the same command again, or give another folder."
        ) from error
    for line in [*report(dropped, len(clips)), *slow_clips(planned, options.encode)]:
        say(line)
    kept, seconds = sum(marker["clips"] for marker in markers.values()), time.monotonic() - start
    counts = f"{kept} clips in {len(parts)} shards, {len(dropped)} dropped"
    say(f"{counts}, in {seconds:.1f} s -> {options.output}")


def _ticker(what: str, total: int, say: Say) -> Callable[[int], None]:
    """Return a function that takes the number of clips done and reports it, at most every 5 s."""
    start = last = time.monotonic()

    def tick(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 5:
            last = now
            left = (total - done) * (now - start) / max(done, 1)
            say(f"{what} {done} of {total} clips, {done / (now - start):.1f}/s, ETA {left:.0f} s")

    return tick


def _parts(planned: list[PlannedClip], size: int, buckets: Sequence[Bucket]) -> list[_Part]:
    numbers, parts = {bucket: i for i, bucket in enumerate(buckets)}, []
    for start in range(0, len(planned), size):
        clips = planned[start : start + size]
        of_clips = [numbers[p.bucket] for p in clips]
        parts.append(_Part(shards.shard_name(start // size), clips, of_clips))
    return parts


def _encode_parts(
    options: VideoPreprocessOptions,
    encoders: list[ClipEncoder],
    parts: Sequence[_Part],
    manifest: dict[str, Any],
    say: Say,
) -> dict[str, dict[str, Any]]:
    """Encode the shards that are not finished yet; return the markers of all shards by name.

    A marker is the content of a shard's ``.json``; see `write_shard`.
    """
    found = {
        part.name: finished(Path(options.output), part.name, len(part.clips), manifest)
        for part in parts
    }
    markers = {name: marker for name, marker in found.items() if marker is not None}
    todo = [part for part in parts if part.name not in markers]
    if markers:
        say(f"{len(markers)} of {len(parts)} shards were finished before.")
    tick = _ticker("Encoded", sum(len(part.clips) for part in todo), say)
    encoded = 0
    for marker in _markers(options, encoders, todo, manifest["fingerprint"]):
        markers[marker["name"]] = marker
        encoded += marker["clips"] + len(marker["dropped"])
        tick(encoded)
    return markers


def _markers(
    options: VideoPreprocessOptions,
    encoders: list[ClipEncoder],
    todo: Sequence[_Part],
    fingerprint: str,
) -> Iterator[dict[str, Any]]:
    """Encode shards, in this process or in workers; yield the marker of each when it is finished.

    A marker is the content of a shard's ``.json``. Before workers start, the list ``encoders`` is
    emptied to free its models, since each worker builds its own.
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
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(size, context, _start_worker, (options, counter, os.getpid()))
    try:
        with held_signals():
            futures = [pool.submit(_work, part, fingerprint) for part in todo]
        for future in as_completed(futures):
            yield future.result()
    except (KeyboardInterrupt, GeneratorExit):
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        raise
    except BrokenProcessPool:
        raise DataError(
            "A worker process ended (out of memory, or killed); finished shards are kept, so run "
            "the same command again, with fewer `--workers`."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_OF_THIS_WORKER: list[tuple[ClipEncoder, VideoPreprocessOptions]] = []


def _start_worker(options: VideoPreprocessOptions, counter: Any, parent: int) -> None:
    # The parent decides about Ctrl-C, which comes to all processes of a terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    release_signals()
    end_with_parent(parent)
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if device.type == "cuda":
        with counter.get_lock():
            device = torch.device("cuda", counter.value % torch.cuda.device_count())
            counter.value += 1
    codec = build_codec(options.codec, device, options.encode.clip_seed)
    text_encoder = build_text_encoder(options.text_encoder, device)
    _OF_THIS_WORKER.append((ClipEncoder(options.encode, codec, text_encoder), options))


def _work(part: _Part, fingerprint: str) -> dict[str, Any]:
    encoder, options = _OF_THIS_WORKER[0]
    return write_shard(encoder, options, part, fingerprint)


def write_shard(
    encoder: ClipEncoder, options: VideoPreprocessOptions, part: _Part, fingerprint: str
) -> dict[str, Any]:
    """Encode and publish one shard; return its ``.json``, which lists the undecodable clips."""
    folder = Path(options.output)
    names = reference_names(options.encode.reference_lengths)
    bad: list[list[Any]] = []
    with shards.ShardWriter(folder, part.name, names, options.storage) as writer:
        for planned, bucket in zip(part.clips, part.buckets, strict=True):
            try:
                sample = encoder.sample(planned)
            except DataError as error:
                bad.append([planned.number, planned.clip.path, str(error)])
            else:
                writer.add(sample, bucket)
    marker = {
        "format": shards.FORMAT, "name": part.name, "fingerprint": fingerprint,
        "clips": len(part.clips) - len(bad), "dropped": bad,
    }  # fmt: skip
    shards.write_json(folder / f"{part.name}.json", marker)
    return marker


def _publish(
    folder: Path,
    manifest: dict[str, Any],
    parts: list[_Part],
    markers: dict[str, dict[str, Any]],
    dropped: list[Dropped],
) -> None:
    """Write ``manifest.json``, and ``dropped.jsonl`` with all clips that the dataset lacks.

    DataError is raised if no clip could be decoded.
    """
    damaged = [
        Dropped(number, path, Drop.UNREADABLE, detail)
        for marker in markers.values()
        for number, path, detail in marker["dropped"]
    ]
    if not any(marker["clips"] for marker in markers.values()):
        raise DataError(
            f"None of the {sum(len(part.clips) for part in parts)} planned clips could be decoded; "
            f"the first: {damaged[0].detail}"
        )
    dropped += damaged
    dropped.sort(key=lambda drop: drop.number)
    lines = [json.dumps({**asdict(d), "reason": d.reason.value}) + "\n" for d in dropped]
    temporary = folder / f"dropped.jsonl.writing.{os.getpid()}"
    write_text(temporary, "".join(lines))
    os.replace(temporary, folder / "dropped.jsonl")
    content = {
        **manifest,
        "shards": [{"name": part.name, "clips": markers[part.name]["clips"]} for part in parts],
        "dropped": dict(Counter(d.reason.value for d in dropped)),
    }
    shards.write_json(folder / shards.MANIFEST, content)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}; see --help.")


_SECTIONS = {"codec": CodecConfig, "text_encoder": TextEncoderConfig, "encode": EncodeConfig}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="preprocess_video.py",
        description="Turns clips with captions into shards of latents and text embeddings.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--input", required=True,
        help="clips: a jsonl or csv of path and text, or a folder with .txt files")  # fmt: skip
    add("--output", required=True, help="folder of the dataset to write")
    add("--buckets", required=True, metavar="JSON", help="bucket plan: a file, or JSON such as "
        '{"256px": {"17": [probability, micro-batch size]}}, or {"17": probability}')  # fmt: skip
    for kind in _SECTIONS.values():
        for flag in flags_of("", kind):
            help_ = f"{flag.help}: {' or '.join(flag.choices)}" if flag.choices else flag.help
            help_ = help_.replace("%", "%%")
            if flag.type is bool:
                add(flag.positive[0], action=argparse.BooleanOptionalAction, default=flag.default,
                    help=help_)  # fmt: skip
                continue
            add(flag.positive[0], type=flag.type, nargs="*" if flag.nargs else None,
                default=flag.default, help=help_)  # fmt: skip
    add("--storage", default="float32", help="type of the stored numbers: float32 or bfloat16")
    add("--workers", type=int, default=1, help="processes that encode")
    add("--clips-per-shard", type=int, default=1000,
        help="most clips of a shard, and most that a killed process loses")  # fmt: skip
    add("--device", default="cpu", choices=("cpu", "cuda"),
        help="where codec and text encoder compute")  # fmt: skip
    return parser


def parse_options(argv: Sequence[str]) -> VideoPreprocessOptions:
    """Turn a command line into options; raise ConfigError for a flag that is wrong."""
    values = vars(_parser().parse_args(list(argv)))
    given = values.pop("buckets")
    if not given.lstrip().startswith("{"):
        try:
            given = read_text(given)
        except UnreadableFile as error:
            raise ConfigError(
                f"`--buckets` ({given}) must be JSON or a file with it, but cannot be read "
                f"({error.reason}); correct it."
            ) from None
    sections = {
        name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        for name, kind in _SECTIONS.items()
    }
    return VideoPreprocessOptions(plan=parse_plan(given), **sections, **values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return status 0, 1 for bad input, 2 for bad flags, 130 if interrupted."""
    try:
        preprocess(parse_options(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        say_to_stderr("Interrupted; finished shards are kept, so run the same command again.")
        return 130
    except MegatronExtError as error:
        for sentence in error.messages:
            say_to_stderr(f"error: {sentence}")
        return 2 if isinstance(error, ConfigError) else 1
    return 0
